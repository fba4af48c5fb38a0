"""What rows ask for beside a plain pick: the columns of launch_shape_rows' and launch_cut_rows' table of int32."""

# In the place of a row of counts, or of a mask: there is none.
NONE = -1

# The row of the logits; of the counts and of the masks, or NONE.
ROW, COUNTS, MASK = 0, 1, 2
# Float32 bits: what seen tokens' logits are divided by, what is taken once and what each time.
REPETITION, PRESENCE, FREQUENCY = 3, 4, 5
# Tokens that are kept, 0 for all; float32 bits of how far below the best logit one may be, 0 or less.
TOP_K, DEPTH = 6, 7
NUM_COLUMNS = 8

# In a count: the prompt has the token. The bits below it count how often the text has it.
IN_PROMPT = 1 << 30
