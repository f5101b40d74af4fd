"""From records to verdicts: the ladder of answers, effects in time, claims."""
