"""The recurrence of a selective scan."""
