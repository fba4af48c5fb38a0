"""The safeguards against silent corruption, and their replacements when one is switched off."""
