"""`python gate_server.py FOLDER PORT KEY.pub...`: Flower's application behind the gate, with TLS and without the rest of a SuperLink."""

from __future__ import annotations

import sys
from pathlib import Path

from fedprompt.deploy.certificates import public_pem
from fedprompt.engines.flower import superlink


def serve(folder: Path, port: int, keys: list[Path]) -> None:
    from flwr.superlink import main

    application = main.create_app()
    known = application.state.linkstate_factory.state()
    for key in keys:
        known.create_node("", "", public_pem(key.read_bytes(), key.stem), 30.0)
    superlink.behind_gate(
        application,
        host="127.0.0.1",
        port=port,
        log_level="error",
        ssl_keyfile=str(folder / "server.key"),
        ssl_certfile=str(folder / "server.pem"),
    )


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), [Path(each) for each in sys.argv[3:]])
