"""From a checkpoint to engine folders."""
