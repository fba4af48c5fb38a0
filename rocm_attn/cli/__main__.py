"""`python -m rocm_attn.cli`, for an environment without the script."""

import sys

from rocm_attn.cli import main

sys.exit(main())
