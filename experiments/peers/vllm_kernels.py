"""Methods that vLLM's worker process gets beside its own: the device time of every kernel."""

from __future__ import annotations

from typing import Any


class Kernels:
    _profile: Any

    def kernels_begin(self) -> None:
        import torch

        torch.cuda.synchronize()
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profile.start()

    def kernels_end(self) -> tuple[float, list[tuple[str, float]]]:
        """Seconds of all kernels and copies since the beginning, and the ten largest by name."""
        import torch

        torch.cuda.synchronize()
        self._profile.stop()
        # A range that somebody named would count its kernels once more.
        events = [event for event in self._profile.key_averages()
                  if not getattr(event, "is_user_annotation", False)]
        each = [(event.key[:80], event.self_device_time_total / 1e6) for event in events]
        each.sort(key=lambda one: -one[1])
        return sum(seconds for _, seconds in each), each[:10]
