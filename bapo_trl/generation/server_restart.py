"""Joins a vLLM server again that was started anew: it has its first weights, and no group to get others."""

import warnings

from accelerate.utils import broadcast_object_list

from .. import trl_compat
from ..scoring import Scoring


class ServerRestarts(Scoring):
    """
    Notices that the vLLM server is another one than before: it is joined anew, and gets the current weights before it
    samples. What it sampled before that is sampled again. To be put before [`~trl.GRPOTrainer`] among the bases of a
    trainer, and before [`~scoring.Scoring`].
    """

    _server_instance: str | None = None  # of the main process: vLLM's name for a server from its start to its end

    def _reset_run_state(self):
        super()._reset_run_state()
        if trl_compat.uses_vllm_server(self) and self.accelerator.is_main_process and self._server_instance is None:
            self._server_instance = self._ask_server_instance()
            if self._server_instance is None:
                warnings.warn(
                    "The vLLM server has several API processes, which look like different servers: its restart would "
                    "not be noticed. Start it with `--api-server-count 1` to have it joined again."
                )

    def _generate_single_turn(self, *args, **kwargs):
        if not trl_compat.uses_vllm_server(self):
            return super()._generate_single_turn(*args, **kwargs)
        self._joins_restarted_server()
        output = super()._generate_single_turn(*args, **kwargs)
        while self._joins_restarted_server():  # TRL repeats a request that broke off: the new server has answered
            output = super()._generate_single_turn(*args, **kwargs)
        return output

    def _joins_restarted_server(self) -> bool:
        """
        Join the server if it was started anew, and have it get the weights before the next request; return whether it
        was. All ranks make this call together.

        Raises:
            RuntimeError: On all ranks, if there is no server within `vllm_server_timeout`, or if it cannot be joined.
        """
        has_joined, failure = False, None
        if self.accelerator.is_main_process:
            try:
                has_joined = self._join_if_restarted()
            except Exception as error:  # TRL's client raises these; the other ranks wait for the answer below
                failure = f"The vLLM server at {self.vllm_generation.vllm_client.base_url} cannot be used: {error}"
        has_joined, failure = broadcast_object_list([has_joined, failure])
        if failure is not None:
            raise RuntimeError(failure)
        if has_joined:
            self._last_loaded_step = -1  # TRL's
        return has_joined

    def _join_if_restarted(self) -> bool:
        if self._server_instance is None:
            return False
        client = self.vllm_generation.vllm_client
        client.check_server(self.args.vllm_server_timeout)
        instance = self._ask_server_instance()
        if instance == self._server_instance:
            return False
        warnings.warn("The vLLM server was started anew: it is joined again, and gets the current weights.")
        client.close_communicator()
        client.init_communicator(device=self.accelerator.device)
        self._server_instance = instance
        return True

    def _ask_server_instance(self) -> str | None:
        info = self.vllm_generation.vllm_client.get_server_info()
        # Each API process of a server has a name of its own
        return info["instance_id"] if info["parallel_config"].get("_api_process_count", 1) == 1 else None
