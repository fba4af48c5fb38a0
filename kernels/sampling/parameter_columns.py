"""Options of rows besides a plain pick: the columns of launch_shape_rows' and launch_cut_rows' table of int32."""

# The value for a row of counts, or of a mask, if there is none.
NONE = -1

# The row of the logits; of the counts and of the masks, or NONE.
ROW, COUNTS, MASK = 0, 1, 2
# Float32 bits: the divisor of seen tokens' logits, the amount subtracted once and the amount subtracted each time.
REPETITION, PRESENCE, FREQUENCY = 3, 4, 5
# Tokens that are kept, 0 for all; float32 bits of the distance that one may be below the best logit, 0 or less.
TOP_K, DEPTH = 6, 7
NUM_COLUMNS = 8

# In a count: the prompt has the token. The bits below it hold the number of times that the text has it.
IN_PROMPT = 1 << 30
