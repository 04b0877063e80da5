"""Common code of the tiers' scripts. Uses the standard library only."""
