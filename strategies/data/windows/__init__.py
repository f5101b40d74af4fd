"""How windows are cut from rows."""
