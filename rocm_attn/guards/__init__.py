"""The safeguards against silent corruption, and what takes their place when one is switched off."""
