"""The laboratory's commands; parser.py lists them."""
