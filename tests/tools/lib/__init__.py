"""What the tiers' scripts share. Standard library only."""
