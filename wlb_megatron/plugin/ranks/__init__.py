"""Process groups of their own, and what one rank says to all others."""
