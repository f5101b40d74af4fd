"""`python -m harness` is `harness`."""

from harness.cli.commands import main

if __name__ == "__main__":
    main()
