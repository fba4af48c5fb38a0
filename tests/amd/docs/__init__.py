"""The pages as a site: how it is built, what of it is made from the code, and that its commands do what it says."""
