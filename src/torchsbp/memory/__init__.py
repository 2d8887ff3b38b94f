"""Memory: predict it, measure it, plan for it."""
