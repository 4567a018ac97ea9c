"""A backend whose servers get their weights from a trainer in another process: it uses no server with older ones."""

from __future__ import annotations

import pytest
from generate_requests import generate_request as request
from sglang_cluster import cluster

from engine.backends.backend import ServerWeights
from engine.errors import BackendError
from engine.tokens.template import ChatTemplate


async def test_newer_weights_are_taken_and_older_ones_put_the_server_out(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format, 2, wait=2) as servers:
        old, new = servers.fakes
        servers.backend.follow(ServerWeights(version=3))
        old.weight_version, new.weight_version = "2", "4"
        for number in range(4):
            found = await servers.backend.generate(request(episode=f"e{number}"))
            assert [(span.version, span.start) for span in found.versions] == [(4, 0)]
        assert [each["healthy"] for each in servers.counts["servers"]] == [False, True]
        old.weight_version = "3"
        await servers.healed()
        assert not [
            path for fake in servers.fakes for path, _ in fake.control
        ]  # it pauses, continues and loads nothing


async def test_a_server_that_began_again_waits_for_the_trainers_weights(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format, wait=1) as servers:
        servers.backend.follow(ServerWeights(version=0))
        servers.fake.weight_version = "default"
        with pytest.raises(BackendError, match="samples with weights 'default', not '0'"):
            await servers.backend.generate(request())
        servers.fake.weight_version = "0"
        await servers.healed()
        assert (await servers.backend.generate(request(episode="other"))).output_ids.tolist() == [5, 6, 7, 8, 2]


async def test_a_version_that_is_told_late_is_not_taken_back(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format) as servers:
        servers.backend.follow(ServerWeights(version=5, prefixes="5"))
        servers.backend.follow(ServerWeights(version=4, prefixes="4"))
        assert (servers.backend.weights.expected, servers.backend.weights.prefixes) == ("5", "5")
        assert servers.backend.server_weights(5) == ServerWeights(version=5, prefixes="5")


async def test_features_of_images_are_those_of_the_weights_that_are_followed(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format) as servers:
        names = [servers.backend.weights.features]
        for version in (3, 3, 4, 3):
            servers.backend.follow(ServerWeights(version=version))
            names.append(servers.backend.weights.features)
        assert names[0] != names[1] == names[2] != names[3] == names[4]
