"""The commands of this room, one file each; packages that need torch are imported when a command runs."""
