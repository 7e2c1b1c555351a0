"""Everything that talks to other processes: the only importer of torch.distributed."""
