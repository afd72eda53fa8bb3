"""A federation of sites without a network: the result is that of one machine, and nobody takes part who should not."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from forgery import forged
from remote_run import (
    SiteRecorder,
    assert_same_as_in_process,
    assert_same_figures,
    exported,
    kept_tensors,
    sites_with,
    tiny_settings,
)
from rich.console import Console
from support import StopAfter, Stopped, run, shared_tensors, worst_difference

from fedprompt.config.registries import TRACKERS
from fedprompt.core import registry
from fedprompt.core.messages import LocalUpdate
from fedprompt.engines.remote.node import Site
from fedprompt.engines.remote.protocol import Answer, Order
from fedprompt.errors import ConfigError, DataError, QuorumError, RunError
from fedprompt.experiment import tracking
from fedprompt.experiment.progress import LiveProgress
from fedprompt.experiment.sites import SECRET, SitesExperiment
from fedprompt.experiment.tracking import Tracker
from fedprompt.federation.loop import Observer
from fedprompt.report.comparison_table import Spread, cells, columns, comparison, header, notes, winners
from fedprompt.runs.run import Run
from fedprompt.runs.store import REFUSED, RUN_ID, UNTESTED, WARNING, RoundRecord

pytestmark = pytest.mark.unit

CLASSES = ["bars", "cross", "disc", "square", "triangle"]
NAMES = [f"client_{place}" for place in range(4)]
DATA = {"source": "tiny", "train_per_cell": 2, "test_per_cell": 1, "classes": CLASSES}
NO_LIST = {**DATA, "classes": None}  # the sites have to agree by themselves


def config(folder: Path, name: str = "sites", **changes: Any) -> dict[str, Any]:
    """The tiny experiment over sites; `engine` is added to."""
    method = changes.get("method", {"name": "fedvpt"})["name"]
    backbone = {"name": "tiny-clip" if registry.methods()[method]().uses_text else "tiny"}
    engine = {"kind": "flower", **changes.pop("engine", {})}
    return tiny_settings(folder / "runs", name, **{"data": DATA, "backbone": backbone, "engine": engine, **changes})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    return exported(tiny_settings(folder, "files", data=DATA), folder / "files")


@pytest.fixture
def post(files: dict[str, Path], tmp_path: Path) -> SiteRecorder:
    return SiteRecorder(sites_with(files, tmp_path / "sites"))


def folders(run: Run, tmp_path: Path) -> dict[int, Path]:
    """Where every site keeps what is its own."""
    return {
        client: tmp_path / "sites" / name / "states" / str(run.reader.fact(RUN_ID))
        for client, name in enumerate(run.clients)
    }


def renamed(file: Path, old: str, new: str, target: Path) -> Path:
    """The same images, one of whose classes has another name."""
    table = pq.read_table(file)
    names = json.loads(table.schema.metadata[b"fedprompt"])
    names["classes"] = [new if name == old else name for name in names["classes"]]
    pq.write_table(table.replace_schema_metadata({"fedprompt": json.dumps(names)}), target)
    return target


def events(run: Run, kind: str) -> list[tuple[int, int | None, str]]:
    return [(round, client, detail) for round, client, found, detail in run.reader.events() if found == kind]


# -- the same result --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedvpt", "pfedbayespt", "pep_fedpt", "pfedpg", "pfedmoap", "pfeddc"])
def test_sites_learn_what_the_same_clients_learn_on_one_machine(
    method: str, post: SiteRecorder, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "method": {"name": method},
        "federation": {"rounds": 3, "fraction": 0.75, "evaluate_every": 2},
    }
    found = SitesExperiment(config(tmp_path, **changes)).federate(post)
    here = run({**config(tmp_path, "here", **changes), "engine": {"kind": "in-process"}})
    assert list(found.clients) == NAMES == list(here.clients)
    assert_same_as_in_process(found, here, folders(found, tmp_path))
    assert events(found, WARNING) == events(here, WARNING)
    assert {kind for _, _, kind, _ in found.reader.events()} <= {WARNING}  # tiny images: it hardly learns


def test_no_message_holds_images_or_what_a_site_keeps(
    files: dict[str, Path], post: SiteRecorder, tmp_path: Path
) -> None:
    """Nor anything of where the server and the sites keep their files."""
    found = SitesExperiment(config(tmp_path)).federate(post)
    everything = b"|".join(blob for _, blob in post.orders + post.answers)
    for client, folder in folders(found, tmp_path).items():
        for name, tensor in (kept_tensors(found, client, folder) or {}).items():
            assert tensor.numpy().tobytes() not in everything, name
    for file in files.values():
        for image in pq.read_table(file).column("image").to_pylist():
            assert image not in everything
            assert image[60:] not in everything
    assert str(tmp_path).encode() not in everything
    assert b"files" not in everything


def test_sites_agree_on_the_classes_they_all_have(files: dict[str, Path], post: SiteRecorder, tmp_path: Path) -> None:
    found = SitesExperiment(config(tmp_path, data=NO_LIST)).federate(post)
    assert found.reader.fact("classes") == sorted(CLASSES)
    setting = Order.from_bytes(post.orders[-1][1]).setting
    assert (setting.class_names, setting.client_names) == (tuple(CLASSES), tuple(NAMES))
    assert found.manifest().clients.train.sizes.tolist() == [0, 0, 0, 0], "the server knows nothing of the images"


# -- who takes part ---------------------------------------------------------------------------------------------------


def test_class_names_that_differ_end_the_run_before_it_begins(
    files: dict[str, Path], post: SiteRecorder, tmp_path: Path
) -> None:
    other = renamed(files["client_2"], "cross", "Cross", tmp_path / "other.parquet")
    post.sites["client_2"] = Site("client_2", str(other), tmp_path / "elsewhere")
    experiment = SitesExperiment(config(tmp_path, data=NO_LIST))
    with pytest.raises(DataError, match=r"sites must agree on the names of the classes, .*client_2.*did you mean"):
        experiment.federate(post)
    assert not experiment.config.run_directory.exists()


def test_where_the_federation_lists_its_classes_a_site_with_others_is_kept_out(
    files: dict[str, Path], post: SiteRecorder, tmp_path: Path
) -> None:
    other = renamed(files["client_2"], "cross", "plus", tmp_path / "other.parquet")
    post.sites["client_2"] = Site("client_2", str(other), tmp_path / "elsewhere")
    found = SitesExperiment(config(tmp_path)).federate(post)
    assert list(found.clients) == ["client_0", "client_1", "client_3"]
    ((_, _, detail),) = events(found, "kept_out")
    assert detail.startswith("client_2: class names must be among those of the federation, got 'plus'")


def test_a_site_with_another_backbone_is_kept_out(files: dict[str, Path], post: SiteRecorder, tmp_path: Path) -> None:
    post.sites["client_1"] = Site("client_1", str(files["client_1"]), tmp_path / "elsewhere", weights="tiny-clip")
    found = SitesExperiment(config(tmp_path)).federate(post)
    assert "client_1" not in found.clients
    ((_, _, detail),) = events(found, "kept_out")
    assert detail.startswith("client_1: weights of the backbone must be the server's")


def test_a_site_that_says_another_name_than_its_key_is_kept_out(
    files: dict[str, Path], post: SiteRecorder, tmp_path: Path
) -> None:
    post.sites["client_1"] = Site("client_0", str(files["client_1"]), tmp_path / "elsewhere")
    found = SitesExperiment(config(tmp_path)).federate(post)
    assert "client_1" not in found.clients
    ((_, _, detail),) = events(found, "kept_out")
    assert detail == "client_1: name must be 'client_1', the one it is admitted under, got 'client_0'"


class Babbling:
    """Not a site at all."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def answer(self, blob: bytes) -> bytes:
        return self._answer


@pytest.mark.parametrize("answer", [b"", b"junk" * 100, bytes(10**7)], ids=["nothing", "junk", "ten megabytes"])
def test_a_node_that_talks_nonsense_is_kept_out(post: SiteRecorder, tmp_path: Path, answer: bytes) -> None:
    post.sites["client_1"] = Babbling(answer)  # type: ignore[assignment]
    found = SitesExperiment(config(tmp_path, federation={"rounds": 1})).federate(post)
    assert list(found.clients) == ["client_0", "client_2", "client_3"]
    assert len(events(found, "kept_out")) == 1


@pytest.mark.parametrize("present", [[], ["client_3"]])
def test_a_run_does_not_begin_without_a_quorum(post: SiteRecorder, tmp_path: Path, present: list[str]) -> None:
    post.sites = {name: post.sites[name] for name in present}
    experiment = SitesExperiment(config(tmp_path, engine={"sites": NAMES}, guard={"quorum": 0.5}))
    with pytest.raises(QuorumError, match=r"sites must be there for 0.5 of 4 \(guard.quorum\) .*client_0: absent"):
        experiment.federate(post)
    assert not experiment.config.run_directory.exists()


def test_a_site_that_is_away_at_the_beginning_is_a_client_that_may_come_later(
    files: dict[str, Path], post: SiteRecorder, tmp_path: Path
) -> None:
    late = post.sites.pop("client_3")

    class Arriving(Observer):
        def committed(self, record: RoundRecord) -> None:
            post.sites["client_3"] = late

    changes: dict[str, Any] = {"engine": {"sites": NAMES}, "federation": {"rounds": 3}}
    found = SitesExperiment(config(tmp_path, **changes)).federate(post, observer=Arriving())
    assert list(found.clients) == NAMES
    refused = {round for round, client, _ in events(found, REFUSED) if client == 3}
    assert refused == {1, 2}, "the messages of round 2 went out with the evaluation of round 1, before it came"
    assert [client for _, client, _ in events(found, UNTESTED)] == [3]
    assert kept_tensors(found, 3, folders(found, tmp_path)[3]) is not None


class TestASiteThatIsGone:
    """One of four sites is killed after round 1 of 3; it has sent its update of round 2 by then."""

    @pytest.fixture
    def said(self) -> io.StringIO:
        return io.StringIO()

    @pytest.fixture
    def found(self, post: SiteRecorder, tmp_path: Path, said: io.StringIO) -> Run:
        class Killing(LiveProgress):
            def committed(self, record: RoundRecord) -> None:
                super().committed(record)
                post.sites.pop("client_2", None)

        experiment = SitesExperiment(config(tmp_path, federation={"rounds": 3}))
        return experiment.federate(post, observer=Killing(Console(file=said, width=200)))

    def test_is_told_beside_the_figures(self, found: Run, said: io.StringIO) -> None:
        worst = 100 * found.summary()["worst"]
        assert f"Worst Local {worst:.2f} % (tested 3 of 4 clients)" in said.getvalue().splitlines()[-1]
        assert found.coverage() == (3, 4)
        assert (found.summary()["tested"], found.summary()["to_test"]) == (3, 4)

    def test_is_absent_and_not_refused(self, found: Run, said: io.StringIO) -> None:
        assert (found.refused(), found.absent()) == ({}, 1)
        assert "round 3: absent client_2 (absent: must be connected)" in said.getvalue()
        assert "refused" not in said.getvalue()

    def test_marks_worst_local_in_tables(self, found: Run) -> None:
        (row,) = comparison([found])
        names, (line,) = header(columns([row])), cells([row], columns([row]))
        shown = dict(zip(names, [cell.text for cell in line], strict=True))
        assert shown["Worst Local"] == f"≤ {100 * found.summary()['worst']:.2f}"
        assert not shown["Average"].startswith("≤")
        assert f"Not every client was tested, so Worst Local can be lower: {row.title}: tested 3 of 4 clients" in notes(
            [row]
        )
        assert f"Clients that were picked and absent: {row.title}: 1 times" in notes([row])
        assert not [note for note in notes([row]) if "refused" in note]

    def test_does_not_win_by_it(self, found: Run) -> None:
        (row,) = comparison([found])
        better = replace(row, values={**row.values, "worst": Spread(1.0, None), "average": Spread(1.0, None)})
        complete = replace(row, coverage=None)
        assert winners([better, complete], "average") == {0}
        assert winners([better, complete, complete], "worst") == {1, 2}


def test_trackers_get_what_the_server_has(post: SiteRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got: dict[int, Any] = {}

    class Kept(Tracker):
        def log(self, step: int, values: Any) -> None:
            got[step] = values

    monkeypatch.setattr(TRACKERS, "_table", {**TRACKERS.table(), "kept": Kept})
    monkeypatch.setattr(tracking, "write_report", lambda runs, folder: SimpleNamespace(html=folder))
    values = config(tmp_path)
    found = SitesExperiment({**values, "output": {**values["output"], "trackers": ["kept"]}}).federate(post)
    assert list(got) == [0, 1, 2]
    assert got[2]["client/client_1/accuracy"] == found.client_accuracies()["client_1"]


def test_only_the_sites_that_are_named_take_part(post: SiteRecorder, tmp_path: Path) -> None:
    found = SitesExperiment(config(tmp_path, engine={"sites": ["client_2", "client_0"]})).federate(post)
    assert list(found.clients) == ["client_0", "client_2"]


# -- going on ---------------------------------------------------------------------------------------------------------


def test_a_resumed_run_finds_its_sites_again(files: dict[str, Path], post: SiteRecorder, tmp_path: Path) -> None:
    """New processes on both sides, on the same directories; and a site that nobody knows is not asked."""
    federation = {"rounds": 3, "fraction": 0.75}
    experiment = SitesExperiment(config(tmp_path, federation=federation))
    with pytest.raises(Stopped):
        experiment.federate(post, observer=StopAfter(1))
    with pytest.raises(RunError, match="exists already; continue it with resume=True"):
        SitesExperiment(config(tmp_path, federation=federation)).federate(post)
    stranger = Site("stranger", str(files["client_0"]), tmp_path / "stranger")
    again = SiteRecorder({**sites_with(files, tmp_path / "sites"), "stranger": stranger})
    resumed = SitesExperiment(config(tmp_path, federation=federation)).federate(again, resume=True)
    assert again.names == tuple(NAMES)
    assert not again.meetings
    whole = SitesExperiment(config(tmp_path, "whole", federation=federation)).federate(
        SiteRecorder(sites_with(files, tmp_path / "others"))
    )
    assert worst_difference(shared_tensors(resumed), shared_tensors(whole)) == 0
    for client, folder in folders(resumed, tmp_path).items():
        other = tmp_path / "others" / NAMES[client] / "states" / str(whole.reader.fact(RUN_ID))
        first, second = kept_tensors(resumed, client, folder) or {}, kept_tensors(whole, client, other) or {}
        assert worst_difference(first, second) == 0
    assert_same_figures(resumed, whole, within=0.0)


def test_a_site_whose_state_is_gone_says_so_or_begins_anew(
    files: dict[str, Path], post: SiteRecorder, tmp_path: Path
) -> None:
    experiment = SitesExperiment(config(tmp_path))
    with pytest.raises(Stopped):
        experiment.federate(post, observer=StopAfter(1))
    lost = sites_with(files, tmp_path / "sites") | {
        "client_1": Site("client_1", str(files["client_1"]), tmp_path / "new")
    }
    found = SitesExperiment(config(tmp_path)).federate(SiteRecorder(lost), resume=True)
    ((round, client, detail),) = events(found, REFUSED)
    assert (round, client) == (2, 1)
    assert "--anew" in detail
    anew = Site("client_1", str(files["client_1"]), tmp_path / "new", anew=True)
    with pytest.raises(Stopped):
        SitesExperiment(config(tmp_path, "second")).federate(
            SiteRecorder(sites_with(files, tmp_path / "sites")), observer=StopAfter(1)
        )
    again = SiteRecorder(sites_with(files, tmp_path / "sites") | {"client_1": anew})
    assert not events(SitesExperiment(config(tmp_path, "second")).federate(again, resume=True), REFUSED)


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"data": {**DATA, "novel": 0.4}}, r"data\.novel must be 0 where clients are sites"),
        ({"attack": {"kind": "nan"}}, r"attack must be absent where clients are sites"),
        (
            {"federation": {"secure_sum": True}},
            r"federation\.secure_sum must be false where clients are sites.*, got True; docs/secure_sum\.md, Over sites",
        ),
        (
            {"privacy": {"noise": 1.0, "noise_at": "step"}},
            r"privacy\.noise_at must be client or server where clients are sites",
        ),
        ({"data": {**DATA, "classes": ["bars", "bars"]}}, r"data\.classes"),
    ],
    ids=["novel", "attack", "secure sum", "noise at steps", "classes"],
)
def test_settings_that_need_images_on_the_server_are_refused(
    changes: dict[str, Any], told: str, post: SiteRecorder, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        SitesExperiment(config(tmp_path, **changes)).federate(post)


def test_the_servers_own_settings_stay_there(post: SiteRecorder, tmp_path: Path) -> None:
    SitesExperiment(config(tmp_path)).federate(post)
    for _, blob in post.orders:
        assert not {"engine", "output"} & set(Order.from_bytes(blob).setting.config)


# -- privacy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise_at", ["client", "server"])
def test_a_private_run_draws_with_a_seed_that_no_site_learns(
    noise_at: str, post: SiteRecorder, files: dict[str, Path], tmp_path: Path
) -> None:
    """Who takes part and the server's noise cannot be told from the config; the number is in no message in any form."""
    changes: dict[str, Any] = {
        "privacy": {"noise": 0.5, "clip": 0.1, "noise_at": noise_at},
        "federation": {"rounds": 3, "fraction": 0.5},
    }
    found = SitesExperiment(config(tmp_path, **changes)).federate(post)
    secret = found.reader.fact(SECRET)
    assert isinstance(secret, int)
    assert secret.bit_length() > 40
    everything = b"|".join(blob for _, blob in post.orders + post.answers)
    forms: list[Callable[[int], bytes]] = [
        lambda number: str(number).encode(),
        lambda number: f"{number:x}".encode(),
        lambda number: number.to_bytes(32, "little"),
        lambda number: number.to_bytes(32, "big"),
    ]
    assert not [form(secret) for form in forms if form(secret) in everything]
    assert all(Order.from_bytes(blob).setting.config["seed"] == 0 for _, blob in post.orders)
    again = SitesExperiment(config(tmp_path, "again", **changes)).federate(
        SiteRecorder(sites_with(files, tmp_path / "others"))
    )
    assert again.reader.fact(SECRET) != secret
    assert not torch.equal(shared_tensors(found)["prompt"], shared_tensors(again)["prompt"])


def test_a_run_that_is_not_private_has_no_secret(post: SiteRecorder, tmp_path: Path) -> None:
    assert SitesExperiment(config(tmp_path)).federate(post).reader.fact(SECRET) is None


@pytest.mark.parametrize("value", [None, "7", "-1", "12345", '"7"', str(2**256)])
def test_a_private_run_does_not_go_on_without_its_secret(post: SiteRecorder, tmp_path: Path, value: str | None) -> None:
    """Noise would follow from the config that every site has."""
    changes: dict[str, Any] = {
        "privacy": {"noise": 0.5, "clip": 0.1, "noise_at": "server"},
        "federation": {"rounds": 3},
    }
    settings = config(tmp_path, **changes)
    with pytest.raises(Stopped):
        SitesExperiment(settings).federate(post, observer=StopAfter(1))
    with forged(SitesExperiment(settings).config.run_directory) as connection:
        if value is None:
            connection.execute("DELETE FROM facts WHERE key = ?", (SECRET,))
        else:
            connection.execute("UPDATE facts SET value = ? WHERE key = ?", (value, SECRET))
    before = len(post.answers)
    with pytest.raises(RunError, match="secret_seed"):
        SitesExperiment(settings).federate(post, resume=True)
    assert len(post.answers) == before


def test_a_private_run_that_was_killed_releases_nothing_twice(
    files: dict[str, Path], post: SiteRecorder, tmp_path: Path
) -> None:
    """Sites that are asked again for a round they have answered send the same bytes, and the run goes on."""
    changes: dict[str, Any] = {"privacy": {"noise": 0.5, "clip": 0.1}, "federation": {"rounds": 3}}

    class StopInRound(Observer):
        def trained(self, round: int, reply: LocalUpdate) -> None:
            if len(updates(post, 2)) == 2:
                raise Stopped

    with pytest.raises(Stopped):
        SitesExperiment(config(tmp_path, **changes)).federate(post, observer=StopInRound())
    again = SiteRecorder(sites_with(files, tmp_path / "sites"))
    found = SitesExperiment(config(tmp_path, **changes)).federate(again, resume=True)
    assert not events(found, REFUSED)

    assert len(updates(post, 2)) == 2
    assert updates(post, 2).items() <= updates(again, 2).items()
    assert sorted(updates(again, 2)) == [0, 1, 2, 3]


def updates(recorder: SiteRecorder, round: int) -> dict[int, bytes]:
    """What went up in a round, by client."""
    found = {}
    for client, blob in recorder.answers:
        answer = Answer.from_bytes(blob)
        reply = answer.reply(10**7)
        if reply is not None and reply.round == round:
            found[client] = answer.packed
    return found
