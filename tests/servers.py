"""An SGLang server in a process group of its own, its log and its HTTP interface."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest


class Server:
    """``sglang.launch_server`` with ``arguments`` on a free port.

    Args:
        log: file of its output.
        arguments: of the command line, without host and port.
        environment: the whole of it.
        cwd: where it runs.
        start_seconds: how long ``wait_ready`` waits.
    """

    def __init__(self, log: Path, arguments: list[str], *, environment: dict[str, str], cwd: Path, start_seconds: int):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self.log_path, self.start_seconds = f"http://127.0.0.1:{port}", log, start_seconds
        command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port), *arguments]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, cwd=cwd, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self) -> None:
        deadline = time.monotonic() + self.start_seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"the server ended with {self.process.returncode}:\n{self.log[-6000:]}")
            with contextlib.suppress(urllib.error.URLError, OSError):
                if urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200:
                    return
            time.sleep(0.5)
        pytest.fail(f"the server was not ready after {self.start_seconds} s:\n{self.log[-6000:]}")

    def wait_ended(self) -> int:
        return self.process.wait(self.start_seconds)

    def generate(self, prompt: str | list[int], new_tokens: int, timeout: float = 60) -> list[int]:
        """Greedy output ids of a text or of token ids."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {"text" if isinstance(prompt, str) else "input_ids": prompt, "sampling_params": sampling}
        request = urllib.request.Request(
            f"{self.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)["output_ids"]

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            return answer.read().decode()

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.stop()
