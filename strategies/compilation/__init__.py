"""The framework's compiler on blocks or on the whole step."""
