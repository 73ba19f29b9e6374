"""The commands of this room, one file each; what needs torch is imported when a command runs."""
