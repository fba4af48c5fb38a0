"""Names and conventions of other libraries, on top of this one."""
