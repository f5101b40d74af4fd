"""The command line: the verbs as commands, their progress on the screen, suites as tests."""
