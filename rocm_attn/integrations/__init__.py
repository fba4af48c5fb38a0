"""Names and conventions of other libraries, over this one."""
