"""A static check of the waits of gfx942 and gfx950 machine code: nothing in flight is used before it is waited for."""
