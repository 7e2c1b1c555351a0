"""Everything that talks to other processes: the only importer of torch.distributed."""

from natgrad.distributed.communicator import Communicator
from natgrad.distributed.watchdog import Pulse

__all__ = ["Communicator", "Pulse"]
