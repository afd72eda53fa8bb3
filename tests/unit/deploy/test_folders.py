"""Folders of a federation: made whole or not at all, and read with suspicion."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from fedprompt.deploy import membership
from fedprompt.deploy.addresses import Address
from fedprompt.deploy.folders import ServerFolder, SiteFolder, check_site_name, init, toml_text
from fedprompt.errors import ConfigError, RunError, StorageError

pytestmark = pytest.mark.unit

PUBLIC = Address("fed.example.org", 9092)
LOCAL = Address("127.0.0.1", 9092)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    init(tmp_path / "fed", PUBLIC, ["hospital-a", "b"])
    return tmp_path / "fed"


def test_a_new_federation_is_as_it_will_be_read(made: Path) -> None:
    server = ServerFolder.load(made / "server")
    assert (server.address, server.secure, list(server.public_keys())) == (PUBLIC, True, ["b", "hospital-a"])
    site = SiteFolder.load(made / "sites" / "hospital-a")
    assert (site.name, site.address, site.secure) == ("hospital-a", PUBLIC, True)
    assert site.ca_certificate.read_bytes() == server.ca_certificate.read_bytes()
    assert site.public_key.read_bytes() == server.public_keys()["hospital-a"].read_bytes()
    assert json.loads((made / "server" / "federation.json").read_text()) == {
        "format": "fedprompt-federation-1",
        "address": "fed.example.org:9092",
        "secure": True,
    }


def test_no_private_key_is_where_it_does_not_belong(made: Path) -> None:
    files = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    private = {name for name in files if b"PRIVATE KEY" in (made / name).read_bytes()}
    assert private == {"server/ca.key", "server/server.key", "sites/hospital-a/key", "sites/b/key"}


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_folders_are_for_their_owner(made: Path) -> None:
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in [made, *made.rglob("*")] if path.is_dir())


def test_flower_is_told_where_the_server_is_from_here(made: Path) -> None:
    server = ServerFolder.load(made / "server")
    told = tomllib.loads((server.flower_home / "config.toml").read_text())["superlink"]
    assert told == {
        "default": "fedprompt",
        "fedprompt": {"address": "127.0.0.1:9092", "root-certificates": str(server.ca_certificate)},
    }
    server.point_flower_to(Address("::1", 7))
    assert server.called_as == Address("::1", 7)
    (server.flower_home / "config.toml").unlink()
    assert server.called_as == LOCAL


def test_an_insecure_federation_has_no_keys_and_stays_on_loopback(tmp_path: Path) -> None:
    server = init(tmp_path / "fed", LOCAL, ["a"], secure=False)
    names = {path.name for path in (tmp_path / "fed").rglob("*") if path.is_file()}
    assert names == {"federation.json", "config.toml", "site.json", "policy.yaml"}
    assert tomllib.loads((server.flower_home / "config.toml").read_text())["superlink"]["fedprompt"]["insecure"]
    assert not SiteFolder.load(tmp_path / "fed" / "sites" / "a").secure
    with pytest.raises(ConfigError, match="must be secure for sites to be admitted or expelled"):
        server.add_key("b", b"")
    with pytest.raises(ConfigError, match=r"address must be one of loopback .*, got 'fed\.example\.org:9092'"):
        init(tmp_path / "other", PUBLIC, ["a"], secure=False)
    assert not (tmp_path / "other").exists()


def test_an_insecure_folder_that_was_moved_off_loopback_is_refused(tmp_path: Path) -> None:
    init(tmp_path / "fed", LOCAL, ["a"], secure=False)
    file = tmp_path / "fed" / "server" / "federation.json"
    file.write_text(file.read_text().replace("127.0.0.1", "0.0.0.0"))
    with pytest.raises(ConfigError, match="address must be one of loopback"):
        ServerFolder.load(tmp_path / "fed" / "server")


def test_what_is_there_is_never_written_over(made: Path) -> None:
    before = (made / "server" / "ca.key").read_bytes()
    with pytest.raises(RunError, match="directory must be new or empty"):
        init(made, PUBLIC, ["a"])
    assert (made / "server" / "ca.key").read_bytes() == before
    assert sorted(path.name for path in made.parent.iterdir()) == ["fed"]


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "fed").mkdir()
    assert init(tmp_path / "fed", PUBLIC, ["a"]).path == tmp_path / "fed" / "server"


def test_a_disk_that_cannot_be_written_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        init(tmp_path / "file" / "fed", PUBLIC, ["a"])


@pytest.mark.parametrize(
    ("address", "sites", "rule"),
    [
        (PUBLIC, [], "site must be given at least once"),
        (PUBLIC, ["a", "a"], "site must have names that differ"),
        (PUBLIC, ["Site", "site"], "site must have names that differ"),
        (PUBLIC, ["a", "../b"], "site must have 1 to 200 letters"),
        (Address("0.0.0.0", 1), ["a"], "address must be one that the sites can call"),
    ],
)
def test_a_federation_that_cannot_work_is_not_made(
    tmp_path: Path, address: Address, sites: list[str], rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule):
        init(tmp_path / "fed", address, sites)
    assert not list(tmp_path.iterdir())


def test_the_folder_above_the_one_that_is_meant_is_told(made: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"must contain a file federation\.json, got .*fed'; did you mean .*fed/server'\?"
    ):
        ServerFolder.load(made)


@pytest.mark.parametrize("name", ["a", "hospital-a", "Klinik_7.west", "_x", "0", "a" * 200])
def test_names_that_sites_may_have(name: str) -> None:
    assert check_site_name("site", name) == name


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "-a", "a/b", "a\\b", "a b", "a\n", "ä", "a\0", "a" * 201])
def test_names_that_sites_may_not_have(name: str) -> None:
    with pytest.raises(ConfigError, match="site must have 1 to 200 letters"):
        check_site_name("site", name)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("", "must be readable JSON"),
        ("[]", "format must be 'fedprompt-site-1', got"),
        ('{"format": "fedprompt-site-2"}', "format must be 'fedprompt-site-1', got 'fedprompt-site-2'"),
        ('{"format": "fedprompt-site-1"}', "must have the fields format, name, address, secure, got"),
        ('{"format": "fedprompt-site-1", "format": "fedprompt-site-1"}', "every key once"),
        (
            '{"format": "fedprompt-site-1", "name": "a", "address": "h:1", "secure": true, "more": 1}',
            "must have the fields",
        ),
        ('{"format": "fedprompt-site-1", "name": "a", "address": "h:1", "secure": 1}', "secure must be a bool, got 1"),
        ('{"format": "fedprompt-site-1", "name": "../a", "address": "h:1", "secure": true}', "name must have 1 to 200"),
        ('{"format": "fedprompt-site-1", "name": "a", "address": "h", "secure": true}', "address must be HOST:PORT"),
        (
            '{"format": "fedprompt-site-1", "name": "a", "address": "h.example:1", "secure": false}',
            "address must be one of loopback",
        ),
    ],
)
def test_a_site_folder_is_read_strictly(made: Path, content: str, rule: str) -> None:
    (made / "sites" / "b" / "site.json").write_text(content)
    with pytest.raises(ConfigError, match=rule):
        SiteFolder.load(made / "sites" / "b")


@pytest.mark.parametrize("name", ["site.json", "ca.crt", "key", "key.pub"])
def test_a_site_folder_that_lacks_a_file_is_refused(made: Path, name: str) -> None:
    (made / "sites" / "b" / name).unlink()
    with pytest.raises(ConfigError, match=f"folder must contain a file {name}"):
        SiteFolder.load(made / "sites" / "b")


@pytest.mark.parametrize("name", ["federation.json", "ca.crt", "server.pem", "server.key"])
def test_a_server_folder_that_lacks_a_file_is_refused(made: Path, name: str) -> None:
    (made / "server" / name).unlink()
    with pytest.raises(ConfigError, match=f"folder must contain a file {name}"):
        ServerFolder.load(made / "server")


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_key_that_others_can_read_is_refused(made: Path) -> None:
    (made / "sites" / "b" / "key").chmod(0o640)
    with pytest.raises(ConfigError, match=r"must be readable by its owner only .*, got '0o640'"):
        SiteFolder.load(made / "sites" / "b")


def test_keys_come_and_go_by_name(made: Path) -> None:
    server = ServerFolder.load(made / "server")
    line = server.public_keys()["b"].read_bytes()
    with pytest.raises(RunError, match="public key of c must differ from all other keys, got 'that of b'"):
        server.add_key("c", line)
    server.remove_key("b")
    assert list(server.public_keys()) == ["hospital-a"]
    with pytest.raises(ConfigError, match="name must be one of hospital-a, got 'b'"):
        server.remove_key("b")
    server.add_key("c", line)
    with pytest.raises(RunError, match="name must be that of a site that is not in the federation yet, got 'C'"):
        server.add_key("C", line)
    assert list(server.public_keys()) == ["c", "hospital-a"]


@pytest.mark.parametrize("text", ["", "plain", 'a "quoted" \\ text', "line\nbreak\ttab", "\x00\x01\x1f\x7f", "ä漢😀"])
def test_toml_gives_a_text_back(text: str) -> None:
    assert tomllib.loads(f"text = {toml_text(text)}") == {"text": text}


def test_a_site_with_a_key_of_its_own_gets_all_but_that_key(tmp_path: Path) -> None:
    server = init(tmp_path / "fed", Address("127.0.0.1", 8000), ["a"])
    SiteFolder.create(tmp_path / "own", "b", server)  # stands for what the site makes: a key of the right kind
    line = membership.admit(server, "b", tmp_path / "own" / "key.pub")
    handed = SiteFolder.create(tmp_path / "handed", "b", server, line)
    assert sorted(path.name for path in handed.path.iterdir()) == ["ca.crt", "key.pub", "policy.yaml", "site.json"]
    with pytest.raises(ConfigError, match="key"):
        SiteFolder.load(handed.path)
    (tmp_path / "own" / "key").rename(handed.key)
    assert SiteFolder.load(handed.path) == handed
    assert set(server.public_keys()) == {"a", "b"}
