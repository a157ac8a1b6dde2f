"""The Helm chart agrees with what it deploys: settings, commands, probes, ports and metrics; and it renders.

What needs rendering is skipped where there is no `helm`. `KUBERNETES_VALIDATE` names a program that takes files, such
as kubernetes-validate or kubeconform, which then checks every rendered object against the schemas of Kubernetes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from prometheus_client import CollectorRegistry

import cli
import diptych
from api.cards import RegistrySnapshot
from api.metrics import MetricsMiddleware, QueueCollector
from core.config import Settings
from core.jobs.record import QueueBacklog
from tests import helm
from tests.deployment import scaling
from tests.deployment.served import ROOT
from workers.metrics import WorkerMetrics

CHART = ROOT / "deployment" / "helm" / "diptych"
FILES = sorted((CHART / "templates").iterdir())
TEXT = "\n".join(path.read_text("utf-8") for path in FILES)
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
SCHEMA = jsonschema_rs.validator_for(json.loads((CHART / "values.schema.json").read_text("utf-8")))
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
needs_helm = pytest.mark.skipif(helm.MISSING, reason="there is no helm: make build/helm/.installed")

AUTOSCALED: dict[str, Any] = {
    "name": "h100",
    "gpu": "nvidia.com/gpu",
    "models": ["someone/xl", "emoji-xl"],
    "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    "maxSurge": 0,
    "maxUnavailable": 1,
    "settings": {"DIPTYCH_PRECISION": "int8"},
    "autoscaling": {
        "enabled": True,
        "models": ["xl", "emoji-xl", "emoji-lm"],
        "targetSeconds": 120,
        "loadingSeconds": 45,
    },
}
FULL: dict[str, Any] = {
    "image": {"registry": "registry.example/team", "tag": "1", "pullSecrets": ["pull"]},
    "settings": {"DIPTYCH_LEASE_S": "20", "DIPTYCH_LOG_FORMAT": "json"},
    "api": {
        "settings": {"DIPTYCH_RATE": "", "DIPTYCH_LOG_FORMAT": "text"},
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}],
        "envFrom": [{"configMapRef": {"name": "proxies"}}],
        "podLabels": {"azure.workload.identity/use": "true", "app.kubernetes.io/component": "mine"},
        "podAnnotations": {"sidecar.example/inject": "false"},
        "autoscaling": {"enabled": True},
        "ingress": {"enabled": True, "host": "pictures.example", "tlsSecret": "tls"},
    },
    "workers": [
        AUTOSCALED,
        {
            "name": "mig",
            "gpu": "nvidia.com/mig-3g.40gb",
            "models": ["emoji-z"],
            "replicas": 0,
            "drainSeconds": 30,
            "settings": {"DIPTYCH_TEXT_MODEL": "off"},
            "startSeconds": 3600,
            "podLabels": {"team": "pictures"},
            "extraEnv": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
        },
    ],
    "redis": {"enabled": False, "existingSecret": "managed-redis"},
    "artifacts": {"url": "s3://bucket/pictures", "existingSecret": "s3", "region": "eu-1"},
    "networkPolicy": {"metricsFrom": [{"namespaceSelector": {}}]},
    "metrics": {
        "keySecret": {"name": "diptych-metrics"},
        "monitors": {"enabled": True},
        "rules": {"enabled": True},
        "dashboard": {"enabled": True},
    },
}


# -- values ------------------------------------------------------------------------------------------------------------


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """As Helm puts a user's values into the chart's."""
    both = values.keys() & changes.keys()
    maps = {name for name in both if isinstance(values[name], dict) and isinstance(changes[name], dict)}
    return {**values, **changes, **{name: merged(values[name], changes[name]) for name in maps}}


@pytest.mark.parametrize("changes", [{}, FULL])
def test_values_fit_their_schema(changes: dict[str, Any]) -> None:
    assert SCHEMA.is_valid(merged(VALUES, changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"worker": []},  # misspelt
        {"workers": []},
        {"workers": [{"models": ["emoji-xl"]}]},  # without a name
        {"workers": [{"name": "Upper"}]},
        {"workers": [{"name": "a", "models": ["x,y"]}]},
        {"workers": [{"name": "a", "settings": {"DIPTYCH_METRICS": ":1"}}]},  # the chart's own
        {"workers": [{"name": "a", "autoscaling": {"models": ['x"}']}}]},
        {"settings": {"DIPTYCH_LEASE_S": 20}},  # numbers are written as Helm pleases
        {"api": {"extraEnv": [{"name": "DIPTYCH_RATE", "value": "1"}]}},  # a setting
        {"settings": {"DIPTYCH_REDIS_URL": "redis://elsewhere"}},
        {"artifacts": {"url": "file:///pod"}},
        {"redis": {"maxmemory": "50%"}},
    ],
)
def test_other_values_do_not(changes: dict[str, Any]) -> None:
    assert not SCHEMA.is_valid(merged(VALUES, changes))


def test_every_value_is_used_and_every_value_used_is_there() -> None:
    """By the paths in the templates. Worker entries are read as `$entry.…`, and what `with` opens by its own name."""
    text = re.sub(r"\{\{-? */\*.*?\*/ *-?\}\}", "", TEXT, flags=re.DOTALL)
    read = {tuple(path.split(".")) for path in re.findall(r"\.Values\.((?:\w+\.?)+)", text)}
    for path in read:
        inner: Any = VALUES
        for name in path:
            assert name in inner, ".".join(path)
            inner = inner[name]
    known = {path[:n] for path in read for n in range(1, len(path) + 1)}
    assert {name for name in VALUES if (name,) not in known} == set()
    fields = set(re.findall(r"\$entry\.(\w+)", text)) - {"name"}
    assert fields == VALUES["workerDefaults"].keys()
    assert set(re.findall(r"\$scaling\.(\w+)", text)) | {"enabled"} == VALUES["workerDefaults"]["autoscaling"].keys()


# -- what it deploys ---------------------------------------------------------------------------------------------------


def test_it_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert (chart["name"], chart["appVersion"]) == ("diptych", diptych.__version__)


def test_every_setting_in_it_is_one() -> None:
    """Also those that the schema reserves, and those that values and pages name."""
    pages = [*FILES, CHART / "values.yaml", CHART / "values.schema.json", ROOT / "docs" / "kubernetes.md"]
    named = {name for path in pages for name in re.findall(r"DIPTYCH_[A-Z][A-Z_]*[A-Z]", path.read_text("utf-8"))}
    assert {"DIPTYCH_REDIS_URL", "DIPTYCH_MODELS", "DIPTYCH_DRAIN_S"} < named
    assert {name.removeprefix("DIPTYCH_").lower() for name in named} <= Settings.model_fields.keys()


def test_every_command_in_it_is_one_that_diptych_takes() -> None:
    commands = re.findall(r"-- diptych (.*)$", TEXT, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        cli.parser().parse_args(shlex.split(command.partition(" |")[0]))


def test_probes_ports_and_users_are_those_of_the_images() -> None:
    """APIs and workers run the images' own commands, so that only what surrounds them is said twice."""
    probe = re.search(r"AS worker\n.*?HEALTHCHECK .*? CMD (\[.*?\])", DOCKERFILE, re.DOTALL)
    assert probe is not None and f"command: {probe[1]}" in TEXT
    assert "httpGet: {path: /healthz, port: http}" in TEXT and 'request("GET", "/healthz")' in (
        ROOT / "deployment" / "probe.py"
    ).read_text("utf-8"), "the API's own health check asks the same"
    port = COMPOSE["api"]["ports"][0].rpartition(":")[2]
    assert f"{{name: http, containerPort: {port}}}" in TEXT
    assert int(port) == Settings.model_fields["port"].default
    address = COMPOSE["worker"]["environment"]["DIPTYCH_METRICS"].removeprefix("${DIPTYCH_METRICS:-").rstrip("}")
    assert f'"DIPTYCH_METRICS" "{address}"' in TEXT
    assert f"{{name: metrics, containerPort: {address.rpartition(':')[2]}}}" in TEXT
    uid = re.search(r"--uid (\d+) --gid (\d+)", DOCKERFILE)
    assert uid is not None and uid[1] == uid[2] and TEXT.count(f'"uid" {uid[1]})') == 2
    assert COMPOSE["redis"]["user"] == "999:999" and TEXT.count('"uid" 999)') == 1
    redis = COMPOSE["redis"]["healthcheck"]["test"][1]
    assert f'command: ["sh", "-c", "{redis}"]' in TEXT
    assert COMPOSE["api"]["environment"]["TMPDIR"] in TEXT


def test_redis_is_configured_as_in_the_compose_file() -> None:
    script = COMPOSE["redis"]["command"][2].replace("$$", "$")
    lines = [line.strip() for line in TEXT.splitlines()]
    start = lines.index("exec redis-server - <<EOF")
    expected = script.strip().splitlines()
    assert lines[start : start + len(expected)] == expected
    assert COMPOSE["redis"]["image"] == VALUES["redis"]["image"]
    assert COMPOSE["redis"]["environment"]["REDIS_MAXMEMORY"] == f"${{REDIS_MAXMEMORY:-{VALUES['redis']['maxmemory']}}}"


class _Service:
    """What the API's collector reads of its service."""

    class cards:  # noqa: N801
        redis_answers = True
        now = RegistrySnapshot(
            backlogs={"image": QueueBacklog(1, 1, 1, 1)}, model_backlogs={"m": QueueBacklog(1, 1, 1, 1)}
        )


def metric_names() -> set[str]:
    api = CollectorRegistry()
    MetricsMiddleware(None, api)  # type: ignore[arg-type]
    api.register(QueueCollector(_Service()))  # type: ignore[arg-type]
    families = [*api.collect(), *WorkerMetrics().registry.collect()]
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}
    return {family.name + suffix for family in families for suffix in suffixes[family.type]}


def test_rules_and_dashboards_ask_for_metrics_that_there_are() -> None:
    rules = yaml.safe_load((CHART / "files" / "rules.yaml").read_text("utf-8"))
    dashboard = json.loads((CHART / "files" / "grafana.json").read_text("utf-8"))
    queries = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    queries += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += re.findall(r'printf "(diptych_\w+)\{', TEXT)
    named = {name for query in queries for name in re.findall(r"\b(?:diptych_\w+|vllm:\w+)", query)}
    assert len(named) > 10
    assert named - {"diptych_device_memory_bytes", "diptych_jobs_in_hand"} <= metric_names()
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_compose_files_prometheus_reads_the_same_rules() -> None:
    config = yaml.safe_load((ROOT / "deployment" / "prometheus" / "prometheus.yml").read_text("utf-8"))
    mounts = dict(volume.split(":")[1::-1] for volume in COMPOSE["prometheus"]["volumes"])
    for file in config["rule_files"]:
        folder, _, name = file.rpartition("/")
        assert (ROOT / mounts[folder] / name).is_file()


# -- rendered ----------------------------------------------------------------------------------------------------------


def render(folder: Path, changes: Mapping[str, Any], kube_version: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "values.yaml").write_text(json.dumps(changes))
    return helm.template(CHART, folder / "values.yaml", kube_version=kube_version)


Objects = dict[tuple[str, str], dict[str, Any]]


def objects_of(folder: Path, changes: Mapping[str, Any], kube_version: str = "") -> Objects:
    done = render(folder, changes, kube_version)
    assert done.returncode == 0, done.stderr
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    named = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(named) == len(objects), "two objects have one name"
    return named


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Objects]:
    """The objects of the chart, by kind and name, with its own values and with all that can be switched on."""
    changes: dict[str, dict[str, Any]] = {"own": {}, "full": FULL}
    return {name: objects_of(tmp_path_factory.mktemp(name), each) for name, each in changes.items()}


def pods(objects: Objects) -> Iterator[tuple[str, dict[str, Any]]]:
    for (_, name), each in objects.items():
        if template := each.get("spec", {}).get("template"):
            yield name, template


def environment(pod: Mapping[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in pod["spec"]["containers"][0]["env"]}


def deployed(objects: Objects, part: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A Deployment's specification, its pod and that one's environment; `part` is "api" or "worker-" and an entry."""
    spec = objects["Deployment", f"r-diptych-{part}"]["spec"]
    return spec, spec["template"], environment(spec["template"])


@needs_helm
@pytest.mark.parametrize("values", ["own", "full"])
def test_objects_belong_together(rendered: dict[str, Objects], values: str) -> None:
    """Selectors select a pod of the chart, names of Secrets, claims and ports are there, and no pod is privileged."""
    objects = rendered[values]
    labels = [pod["metadata"]["labels"] for _, pod in pods(objects)]
    given = {"managed-redis", "s3", "diptych-metrics", "hub"}
    for (kind, name), each in objects.items():
        spec = each.get("spec", {})
        selector = spec.get("podSelector", spec.get("selector", {}))
        selector = selector.get("matchLabels", selector)
        if selector and kind != "ServiceMonitor":
            assert any(selector.items() <= label.items() for label in labels), (kind, name)
        if kind in ("HorizontalPodAutoscaler", "ScaledObject"):
            assert ("Deployment", spec["scaleTargetRef"]["name"]) in objects
            assert "replicas" not in objects["Deployment", spec["scaleTargetRef"]["name"]]["spec"]
    for name, pod in pods(objects):
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["automountServiceAccountToken"] is False, name
        assert spec["enableServiceLinks"] is False, f"{name}: the Service would set DIPTYCH_PORT"
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            used = [check["port"] for key, check in container[probe].items() if key in ("httpGet", "tcpSocket")]
            assert set(used) <= ports
        secrets = {value["secretKeyRef"]["name"] for value in environment(pod).values() if isinstance(value, dict)}
        assert all(secret in given or ("Secret", secret) in objects for secret in secrets), name
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        templates = objects.get(("StatefulSet", name), {"spec": {}})["spec"].get("volumeClaimTemplates", [])
        claims = {each["metadata"]["name"] for each in templates}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys() | claims, name
        for volume in volumes.values():
            if claim := volume.get("persistentVolumeClaim"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in objects


@needs_helm
@pytest.mark.parametrize("values", ["own", "full"])
def test_containers_get_settings_that_can_be_read(
    rendered: dict[str, Objects], values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, pod in pods(rendered[values]):
        variables = environment(pod)
        if "redis" in name:
            continue
        for field in Settings.model_fields:
            monkeypatch.delenv(f"DIPTYCH_{field.upper()}", raising=False)
        for variable, value in variables.items():
            whole = "redis://elsewhere:6379/0" if isinstance(value, dict) else value.replace("$(REDIS_PASSWORD)", "x")
            monkeypatch.setenv(variable, whole)
        settings = Settings()
        assert settings.redis_url.startswith("redis://") and settings.artifacts_url
        grace_s = pod["spec"]["terminationGracePeriodSeconds"]
        if "worker" in name:
            assert grace_s > settings.drain_s + 10, "it is killed before it has handed back what it had"
            assert settings.metrics.endswith(f":{pod['spec']['containers'][0]['ports'][0]['containerPort']}")


@needs_helm
def test_an_entry_says_what_its_workers_are(rendered: dict[str, Objects]) -> None:
    gpu, pod, variables = deployed(rendered["full"], "worker-h100")
    mig, _, mig_variables = deployed(rendered["full"], "worker-mig")
    _, _, cpu = deployed(rendered["own"], "worker-cpu")
    assert variables["DIPTYCH_MODELS"] == "someone/xl,emoji-xl" and "DIPTYCH_MODEL" not in variables
    assert mig_variables["DIPTYCH_MODEL"] == "emoji-z"
    assert cpu["DIPTYCH_DEVICE"] == "cpu" and "DIPTYCH_DEVICE" not in variables
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert container["image"] == "registry.example/team/diptych-worker-gpu:1"
    assert pod["spec"]["nodeSelector"] == AUTOSCALED["nodeSelector"]
    assert gpu["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}, "0 is a value"
    assert mig["replicas"] == 0
    assert {environment(pod)["DIPTYCH_LEASE_S"] for _, pod in pods(rendered["full"])} == {"20"}
    _, _, api = deployed(rendered["full"], "api")
    assert (api["DIPTYCH_LOG_FORMAT"], api["DIPTYCH_RATE"]) == ("text", ""), "a part's own settings come first"
    assert api["DIPTYCH_PUBLIC_URL"] == "https://pictures.example"


@needs_helm
def test_pods_carry_what_their_part_adds_and_no_versions(rendered: dict[str, Objects]) -> None:
    _, api, variables = deployed(rendered["full"], "api")
    added = {"azure.workload.identity/use": "true", "app.kubernetes.io/component": "api"}  # it is selected by the last
    assert api["metadata"]["labels"].items() >= added.items()
    assert api["metadata"]["annotations"] == {"sidecar.example/inject": "false"}
    assert variables["HTTPS_PROXY"] == "http://proxy.example:3128"
    sources = [{"secretRef": {"name": "s3"}}, {"configMapRef": {"name": "proxies"}}]
    assert api["spec"]["containers"][0]["envFrom"] == sources
    _, mig, variables = deployed(rendered["full"], "worker-mig")
    assert mig["metadata"]["labels"]["team"] == "pictures"
    assert variables["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    for objects in rendered.values():
        for name, pod in pods(objects):  # or every upgrade of the chart would restart it
            assert not {"helm.sh/chart", "app.kubernetes.io/version"} & pod["metadata"]["labels"].keys(), name


@needs_helm
def test_threads_of_a_cpu_are_those_of_its_limit(tmp_path: Path) -> None:
    limited = {"name": "limited", "resources": {"limits": {"cpu": "4"}}}
    entries: list[dict[str, Any]] = [
        limited,
        {"name": "unlimited"},
        {**limited, "name": "own", "settings": {"DIPTYCH_THREADS": "3"}},
        {**limited, "name": "gpu", "gpu": "nvidia.com/gpu"},
    ]

    def threads(name: str, **changes: Any) -> Any:
        return deployed(objects_of(tmp_path, {"workers": entries, **changes}), f"worker-{name}")[2].get(
            "DIPTYCH_THREADS"
        )

    limit = {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1"}}  # rounded up to a whole number
    assert [threads(entry["name"]) for entry in entries] == [limit, None, "3", None]
    assert threads("limited", settings={"DIPTYCH_THREADS": "2"}) == "2"


@needs_helm
@pytest.mark.parametrize(
    ("api", "url"),
    [
        ({}, None),
        ({"trustNetwork": True}, "http://r-diptych-api.n"),
        ({"trustNetwork": True, "service": {"port": 8080}}, "http://r-diptych-api.n:8080"),
        ({"trustNetwork": True, "service": {"type": "LoadBalancer"}}, None),  # called from elsewhere, by an address
        ({"trustNetwork": True, "publicUrl": "https://pictures.example"}, "https://pictures.example"),
        ({"trustNetwork": True, "ingress": {"enabled": True, "host": "b.example"}}, "http://b.example"),
    ],
)
def test_pods_that_are_trusted_call_by_the_services_name(tmp_path: Path, api: dict[str, Any], url: str | None) -> None:
    assert deployed(objects_of(tmp_path, {"api": api}), "api")[2].get("DIPTYCH_PUBLIC_URL") == url


@needs_helm
def test_the_artifacts_volume_is_given_to_the_pods_user_if_asked(tmp_path: Path, rendered: dict[str, Objects]) -> None:
    asked = objects_of(tmp_path, {"artifacts": {"storage": {"chown": True}}})
    for name, pod in pods(asked):
        owners = pod["spec"].get("initContainers", [])
        assert len(owners) == ("redis" not in name)
        for owner in owners:
            container = pod["spec"]["containers"][0]
            assert owner["image"] == container["image"] and owner["volumeMounts"][0] in container["volumeMounts"]
            user = pod["spec"]["securityContext"]["runAsUser"]
            assert owner["command"] == ["chown", f"{user}:{user}", owner["volumeMounts"][0]["mountPath"]]
            assert owner["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert not [name for name, pod in pods(rendered["own"]) if "initContainers" in pod["spec"]]


@needs_helm
def test_pods_that_are_not_ready_do_not_keep_a_node(tmp_path: Path) -> None:
    """Kubernetes before 1.27 does not know the field, and would reject it."""
    for version, policy in (("1.26.9", None), ("1.27.0", "AlwaysAllow"), ("1.33.1-eks-1", "AlwaysAllow")):
        objects = objects_of(tmp_path, {}, version)
        budgets = [each["spec"] for (kind, _), each in objects.items() if kind == "PodDisruptionBudget"]
        assert len(budgets) == 2
        assert {budget.get("unhealthyPodEvictionPolicy") for budget in budgets} == {policy}
        assert all(budget["maxUnavailable"] == 1 and budget["selector"]["matchLabels"] for budget in budgets)


@needs_helm
def test_no_alert_before_a_workers_longest_start_is_over(rendered: dict[str, Objects]) -> None:
    rules = rendered["full"]["PrometheusRule", "r-diptych"]["spec"]["groups"][0]["rules"]
    (rule,) = [rule for rule in rules if rule["alert"] == "DiptychModelWithoutWorker"]
    assert rule["for"] == f"{3600 + 300}s"
    by_default = VALUES["workerDefaults"]["startSeconds"] + 300
    assert f"for: {by_default // 60}m #" in (CHART / "files" / "rules.yaml").read_text("utf-8")


@needs_helm
def test_redis_is_reached_by_apis_and_workers_alone(rendered: dict[str, Objects]) -> None:
    policy = rendered["own"]["NetworkPolicy", "r-diptych-redis"]["spec"]
    (rule,) = policy["ingress"]
    peers = [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
    allowed = {
        name for name, pod in pods(rendered["own"])
        if any(peer.items() <= pod["metadata"]["labels"].items() for peer in peers)
    }  # fmt: skip
    assert allowed == {"r-diptych-api", "r-diptych-worker-cpu"}
    assert rendered["own"]["NetworkPolicy", "r-diptych-worker"]["spec"]["ingress"] == []
    assert not [name for kind, name in rendered["full"] if "redis" in name], "Redis is elsewhere"


def beside_autoscaled(settings_of_first: Mapping[str, str] = {}, **entry: Any) -> dict[str, Any]:
    """Values with the scaled entry, and another one called b."""
    return {"workers": [merged(AUTOSCALED, {"settings": settings_of_first}), {**entry, "name": "b"}]}


@needs_helm
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"redis": {"enabled": False}}, "redis.existingSecret: must name a Secret"),
        ({"workers": [{"name": "a"}, {"name": "a"}]}, "workers: there are two entries a"),
        ({"workers": [{"name": "a", "maxSurge": 0}]}, "workers.a: maxSurge and maxUnavailable must not both be 0"),
        ({"workers": [{"name": "a", "autoscaling": {"enabled": True}}]}, "workers.a.autoscaling.models: must list"),
        ({"workers": [AUTOSCALED]}, "workers.h100.autoscaling: needs metrics.keySecret.name"),
        (beside_autoscaled(**AUTOSCALED), "xl is served by the entry b too"),
        (beside_autoscaled(), "emoji-xl is served by the entry b too"),
        (beside_autoscaled(models=["/models/xl"]), "xl is served by the entry b too"),
        (beside_autoscaled(models=["z"]), "emoji-lm is served by the entry b too"),
        (
            beside_autoscaled({"DIPTYCH_TEXT_MODEL": "off"}, models=["z"], settings={"DIPTYCH_TEXT_MODEL": "me/xl"}),
            "xl is served by the entry b too",
        ),
        (
            beside_autoscaled(models=["z"], settings={"DIPTYCH_TEXT_MODELS": "someone/l, xl,m"}),
            "xl is served by the entry b too",
        ),
        (
            {"metrics": {"keySecret": {"name": ""}, "monitors": {"enabled": True}}},
            "metrics.monitors: need metrics.keySecret.name",
        ),
        ({"metrics": {"monitors": {"enabled": True}}}, "metrics.monitors: need networkPolicy.metricsFrom"),
        ({"workers": [merged(AUTOSCALED, {"autoscaling": {"loadingSeconds": 120}})]}, "must be below targetSeconds"),
        ({"workers": [merged(AUTOSCALED, {"autoscaling": {"minReplicas": 9}})]}, "minReplicas: exceeds maxReplicas"),
        ({"worker": []}, "worker"),
    ],
)
def test_values_that_cannot_work_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    key = {} if "needs metrics" in message else {"metrics": {"keySecret": {"name": "metrics"}}}
    done = render(tmp_path, merged(key, changes))
    assert done.returncode != 0 and message in done.stderr


@needs_helm
def test_helm_and_kubernetes_find_no_fault(rendered: dict[str, Objects], tmp_path: Path) -> None:
    (tmp_path / "full.yaml").write_text(json.dumps(FULL))
    for values in ([], [tmp_path / "full.yaml"]):
        done = helm.lint(CHART, *values)
        assert done.returncode == 0, done.stdout + done.stderr
    if program := os.environ.get("KUBERNETES_VALIDATE"):
        objects = [each for objects in rendered.values() for each in objects.values()]
        known = [each for each in objects if not re.search("coreos|keda", each["apiVersion"])]
        (tmp_path / "objects.yaml").write_text(yaml.safe_dump_all(known))
        subprocess.run([*shlex.split(program), str(tmp_path / "objects.yaml")], check=True)


@needs_helm
def test_a_scaled_entry_asks_the_metrics_of_its_models(rendered: dict[str, Objects]) -> None:
    spec = rendered["full"]["ScaledObject", "r-diptych-worker-h100"]["spec"]
    triggers = {trigger["name"]: trigger["metadata"]["valueLocation"] for trigger in spec["triggers"]}
    scaling_of = AUTOSCALED["autoscaling"]
    assert triggers == scaling.locations(scaling_of["models"])
    formula = spec["advanced"]["scalingModifiers"]["formula"]
    assert formula == scaling.formula(3, scaling_of["targetSeconds"], scaling_of["loadingSeconds"])
    assert spec["minReplicaCount"] == 0 and spec["initialCooldownPeriod"] > spec["cooldownPeriod"]
    service = rendered["full"]["Service", "r-diptych-api"]["spec"]["ports"][0]["port"]
    assert {trigger["metadata"]["url"] for trigger in spec["triggers"]} == {f"http://r-diptych-api.n:{service}/metrics"}
