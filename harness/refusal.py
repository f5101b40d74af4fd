"""What a user can mend."""


class Refusal(Exception):
    """A mistake of the user, or a fault of what they gave: its text is the one sentence that they read."""
