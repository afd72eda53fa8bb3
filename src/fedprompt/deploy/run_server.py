"""`fedprompt server`: Flower's SuperLink with TLS, keys of sites, and a gate that restricts other machines."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import time
from threading import Thread

from fedprompt.deploy import expiry
from fedprompt.deploy.addresses import Address
from fedprompt.deploy.flower_cli import check_installed, environment
from fedprompt.deploy.folders import ServerFolder
from fedprompt.deploy.health import answers, has_limits, keeps_strangers_out
from fedprompt.deploy.lockfile import claimed
from fedprompt.deploy.membership import nodes, reconcile
from fedprompt.deploy.metrics import ServerFigures
from fedprompt.deploy.operator_listener import listening
from fedprompt.deploy.watch_server import EVERY, Watch, every
from fedprompt.errors import ConfigError, FedpromptError, RunError, broken
from fedprompt.io.log_lines import Format, configure, fact, relaying, take_over

START = 60.0  # seconds within which a server must answer
POLL = 0.2
OWN_LOOKS = ("ControlServicer.ListNodes",)  # how Flower logs the requests of the watch, every few seconds


def start(
    folder: ServerFolder,
    bind: Address | None = None,
    insecure: bool = False,
    metrics: Address | None = None,
    log_format: Format = "text",
) -> None:
    """Serve until a signal stops it. Logs the equivalent Flower command, and `ready` once sites can connect.

    `metrics` is where /metrics and /ready are served.
    """
    configure(log_format)
    check_installed()
    bind = bind or folder.address.listening
    check_insecure(folder, bind, insecure)
    expiry.check(expiry.of_server(folder))
    _check_reachable_from_here(folder, bind)
    watch = Watch.of(folder, lambda: nodes(folder))
    with claimed(folder.path, "folder", "server"), relaying(), listening(metrics, ServerFigures(watch)):
        _serve(folder, bind, watch)


def _serve(folder: ServerFolder, bind: Address, watch: Watch) -> None:
    _check_free(bind)
    os.environ.update(environment(folder))
    folder.point_flower_to(bind.from_here)
    folder.runs.mkdir(mode=0o700, exist_ok=True)
    arguments = superlink_arguments(folder, bind)
    fact(f"runs: FLWR_HOME={shlex.quote(str(folder.flower_home))} flower-superlink {shlex.join(arguments)}")
    from fedprompt.engines.flower.superlink import serve

    signal.signal(signal.SIGTERM, lambda *_: None)  # Flower shuts down first and then passes the signal on
    served = expiry.of_server(folder)  # as loaded now: a renewed certificate needs a restart
    expiry.watch(lambda: served, warn)
    take_over(hidden=OWN_LOOKS)
    opening = _Opening(folder, watch)
    opening.start()
    serve(arguments, own_address=not (bind.is_loopback or bind.is_wildcard))
    watch.open = False
    if opening.error is not None:
        raise opening.error


def superlink_arguments(folder: ServerFolder, bind: Address) -> list[str]:
    """The arguments of `flower-superlink`."""
    trust = ["--insecure"]
    if folder.secure:
        trust = ["--ssl-ca-certfile", str(folder.ca_certificate), "--ssl-certfile", str(folder.certificate)]
        trust += ["--ssl-keyfile", str(folder.certificate_key), "--enable-supernode-auth"]
    where = ["--host", bind.host, "--port", str(bind.port), "--database", str(folder.database)]
    return [*where, *trust, "--isolation", "subprocess", "--disable-runtime-dependency-installation"]


def check_insecure(folder: ServerFolder, bind: Address, insecure: bool) -> None:
    """Without TLS and keys only on loopback, and only if requested here and at the creation of the folder."""
    if insecure and folder.secure:
        raise ConfigError(broken("--insecure", "be absent for a federation with certificates", str(folder.path)))
    if not folder.secure and not insecure:
        raise ConfigError(f"--insecure must be given for a federation without certificates, got none for {folder.path}")
    if insecure and not bind.is_loopback:
        raise ConfigError(broken("bind", "be a loopback address without TLS and keys", str(bind)))


def _check_reachable_from_here(folder: ServerFolder, bind: Address) -> None:
    """The server calls itself at the address it listens on, and its certificate must be valid for that."""
    if not folder.secure:
        return
    from fedprompt.deploy.certificates import names_host

    if not names_host(folder.certificate, bind.from_here.host):
        rule = f"be 0.0.0.0, [::], a loopback address or that of the certificate ({folder.address.host})"
        raise ConfigError(broken("bind", rule, str(bind)))


def _check_free(bind: Address) -> None:
    """Check that the address is free, because Flower would notice too late."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            bind.host, bind.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        raise RunError(broken("bind", f"be free to listen on ({error.strerror})", str(bind))) from error


class _Opening(Thread):
    """Waits for the server, checks its gate, and admits the sites; stops the server if that fails."""

    def __init__(self, folder: ServerFolder, watch: Watch) -> None:
        super().__init__(name="opening", daemon=True)
        self._folder, self._watch = folder, watch
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._open()
        except Exception as error:
            self.error = error
            os.kill(os.getpid(), signal.SIGTERM)

    def _open(self) -> None:
        deadline = time.monotonic() + START
        while not answers(self._folder):
            if time.monotonic() > deadline:
                raise RunError(f"the server at {self._folder.called_as} gave no answer within {START:g} s")
            time.sleep(POLL)
        if not keeps_strangers_out(self._folder):
            raise FedpromptError("Flower's Control API answers requests of other machines; the server was stopped")
        if not has_limits(self._folder):
            raise FedpromptError("connections to Flower's server have no limits; the server was stopped")
        refused = reconcile(self._folder) if self._folder.secure else {}
        for name, reason in refused.items():
            fact(f"not admitted: {reason}", "warning", site=name)
        sites = [name for name in self._folder.public_keys() if name not in refused] if self._folder.secure else []
        fact(f"ready at {self._folder.address}" + (f" for {', '.join(sites)}" if sites else ""))
        self._watch.open = True
        every(EVERY, self._watch.look, "watch")


def warn(text: str) -> None:
    fact(text, "warning")
