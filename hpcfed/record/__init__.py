"""What runs leave on disk: the folder, results, snapshots, checkpoints, and safe readers."""
