"""Server side of the weight transfer over gloo. Import it only in the workers of a vLLM server."""

from collections.abc import Iterator

import torch
from torch.distributed import TCPStore
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from .weight_group import TIMEOUT, broadcast, join_weight_group


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    """vLLM's NCCL engine with a gloo process group: receives one tensor at a time on the CPU."""

    def init_transfer_engine(self, init_info) -> None:
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        store = TCPStore(init_info.master_address, init_info.master_port, is_master=False, timeout=TIMEOUT)
        self.model_update_group = join_weight_group(store, rank, init_info.world_size)

    def receive_weights(self, update_info) -> None:
        self.model.load_weights(self._receive(update_info))

    def _receive(self, update_info) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self.model_update_group, weight)
            yield name, weight

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        # On CPUs, vLLM uses a packed copy of the output weights. If they are tied to the embeddings, vLLM does not
        # update the copy when it reloads the embeddings, and would keep sampling with the old weights.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
