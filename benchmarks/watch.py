"""SM clock, power and temperature of the GPU while something is timed.

A thread reads them all the time, through NVML where ``pynvml`` is installed, else through one
``nvidia-smi`` that repeats itself. Only what is read inside ``with watch:`` is kept: then the GPU
is at work, and not in a pause or a compilation.
"""

import contextlib
import statistics
import subprocess
import threading
import time
from collections.abc import Generator
from typing import Any

from benchmarks.environment import first_gpu

Sample = tuple[float, float, float]  # SM clock in MHz, power in W, temperature in degrees Celsius

NVML_SECONDS = 0.005
SMI_MILLISECONDS = 50
FIELDS = "clocks.sm,power.draw.instant,temperature.gpu"


def nvml_samples() -> Generator[Sample, None, None]:
    """Readings of the first GPU through NVML; power is the instantaneous one."""
    import pynvml

    which = first_gpu()
    if which.isdecimal():
        gpu = pynvml.nvmlDeviceGetHandleByIndex(int(which))
    else:
        gpu = pynvml.nvmlDeviceGetHandleByUUID(which)
    (power,) = pynvml.nvmlDeviceGetFieldValues(gpu, [pynvml.NVML_FI_DEV_POWER_INSTANT])
    instant = power.nvmlReturn == pynvml.NVML_SUCCESS
    while True:
        if instant:
            (power,) = pynvml.nvmlDeviceGetFieldValues(gpu, [pynvml.NVML_FI_DEV_POWER_INSTANT])
            watts = power.value.uiVal / 1e3
        else:  # averaged over a second
            watts = pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3
        clock = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
        heat = pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)
        yield float(clock), watts, float(heat)
        time.sleep(NVML_SECONDS)


def smi_samples() -> Generator[Sample, None, None]:
    """Readings of the first GPU by an ``nvidia-smi`` that ends with the generator."""
    command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    command += ["-i", first_gpu()]
    command += ["-lms", str(SMI_MILLISECONDS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                yield sample(line)
        finally:
            process.terminate()


def sample(line: str) -> Sample:
    """What one line of nvidia-smi says; NaN where it says that it does not know."""

    def number(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            return float("nan")

    clock, watts, heat = (number(text) for text in line.split(","))
    return clock, watts, heat


def source() -> Generator[Sample, None, None]:
    """NVML's readings, or nvidia-smi's where ``pynvml`` is not installed or finds no NVML."""
    try:
        import pynvml
    except ImportError:
        return smi_samples()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return smi_samples()
    return nvml_samples()


class Watch:
    """Keeps the readings that fall into ``with watch:``, until `taken` asks for them.

    Parameters
    ----------
    samples : generator of Sample, optional
        Where readings come from; default `source`. It is run, and closed, in a thread.

    Attributes
    ----------
    failure : str
        Why there are no more readings; empty while there are.
    """

    def __init__(self, samples: Generator[Sample, None, None] | None = None) -> None:
        self.failure = ""
        self._kept: list[Sample] = []
        self._on = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(samples or source(),), daemon=True)
        self._thread.start()

    def _run(self, samples: Generator[Sample, None, None]) -> None:
        try:
            with contextlib.closing(samples):
                for reading in samples:
                    if self._over.is_set():
                        return
                    if self._on.is_set():
                        self._kept.append(reading)
        except Exception as error:  # a benchmark without a clock beside it is still one
            self.failure = f"{type(error).__name__}: {error}"

    def __enter__(self) -> "Watch":
        self._on.set()
        return self

    def __exit__(self, *error: object) -> None:
        self._on.clear()

    def taken(self) -> dict[str, Any]:
        """Medians of the readings since the last call, as columns of a row; None without any."""
        kept, self._kept = self._kept, []
        names = ("sm_clock_mhz", "power_w", "temperature_c")
        found: dict[str, Any] = dict.fromkeys(names)
        for name, values in zip(names, zip(*kept, strict=True), strict=False):
            known = [value for value in values if value == value]
            found[name] = round(statistics.median(known), 1) if known else None
        return {**found, "samples": len(kept)}

    def close(self) -> None:
        """End the thread and what it started."""
        self._over.set()
        self._thread.join(timeout=5)
