"""Keys that have names, roles and limits; their file, who asks with one, and how much he may."""
