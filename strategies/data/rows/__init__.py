"""How the rows of a corpus are read and in which type they are stored."""
