import pytest

from twinhull.handoff import notice

pytestmark = pytest.mark.live


def test_an_announced_version_is_found(server, client):
    assert notice.newest_hint(client, server.keys, "fit") is None
    assert notice.announce(client, server.keys, "fit", 7)
    assert notice.newest_hint(client, server.keys, "fit") == 7
    assert notice.newest_hint(client, server.keys, "other") is None


def test_the_hint_can_be_read_in_a_pipeline(server, client):
    notice.announce(client, server.keys, "fit", 12)
    with client.pipeline() as pipeline:
        found = pipeline.get(server.keys.notice("fit")).get("nothing").execute()
    assert [notice.announced(reply) for reply in found] == [12, None]


def test_a_broker_that_is_away_is_logged_and_never_raised(server, client, caplog):
    server.kill()
    assert not notice.announce(client, server.keys, "fit", 1)
    assert notice.newest_hint(client, server.keys, "fit") is None
    assert "notice not sent" in caplog.text


@pytest.mark.parametrize("junk", [b"", b"new", b"-1", b"1.5", None, 3])
def test_junk_is_no_hint(junk):
    assert notice.announced(junk) is None
