"""Hand damaged and hostile files to every command."""
