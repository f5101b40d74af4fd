"""What each verb answers, as values: plan, fit, advise, compare, check, doctor."""
