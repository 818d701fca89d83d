"""A release: its version is one, the changelog has it, and the workflow publishes what was tested."""

import itertools
import re
import subprocess
from pathlib import Path

import shardformer

ROOT = Path(__file__).parents[2]
WORKFLOW = (ROOT / ".github/workflows/release.yml").read_text()
CHANGELOG = (ROOT / ".github/CHANGELOG.md").read_text()
VERSION = shardformer.__version__


def list_releases(changelog: str) -> list[str]:
    return re.findall(r"^## (\d+\.\d+\.\d+)", changelog, re.MULTILINE)


def read_step(name: str) -> str:
    """Returns the shell command of a step of the workflow."""
    (found,) = re.findall(rf"- name: {name}\n(?: +#.*\n)? +run: (?:\|\n((?: {{10}}.*\n)+)|(.*)\n)", WORKFLOW)
    return "".join(found)


def test_version_is_the_newest_of_the_changelog_and_the_citation():
    assert list_releases(CHANGELOG)[0] == VERSION
    assert f"\nversion: {VERSION}\n" in (ROOT / ".github/CITATION.cff").read_text()


def test_releases_descend():
    def is_newer(a, b):
        return tuple(map(int, a.split("."))) > tuple(map(int, b.split(".")))

    releases = list_releases(CHANGELOG)
    assert all(is_newer(a, b) for a, b in itertools.pairwise(releases))
    assert not is_newer("0.9.0", "0.10.0")


def run_step(name: str, tag: str, folder: Path) -> subprocess.CompletedProcess:
    environment = {"GITHUB_REF_NAME": tag, "GITHUB_REPOSITORY": "someone/shardformer", "PATH": "/usr/bin:/bin"}
    return subprocess.run(["bash", "-ec", read_step(name)], cwd=folder, env=environment, capture_output=True, text=True)


def test_tag_of_another_version_is_rejected():
    assert run_step("Compare the tag with the version", f"v{VERSION}", ROOT).returncode == 0
    assert run_step("Compare the tag with the version", "v9.9.9", ROOT).returncode == 1


def test_version_without_a_changelog_section_is_rejected():
    assert run_step("Find the version in the changelog", f"v{VERSION}", ROOT).returncode == 0
    assert run_step("Find the version in the changelog", "v0.2", ROOT).returncode == 1


def test_published_readme_has_no_relative_link(tmp_path):
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    assert run_step("Point the README's links to this repository", "v1.0.0", tmp_path).returncode == 0
    page = (tmp_path / "README.md").read_text()
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert len(links) > 10
    assert all(link.startswith("https://") for link in links), links
    assert "https://raw.githubusercontent.com/someone/shardformer/v1.0.0/.github/layer.png" in links
    assert "https://github.com/someone/shardformer/blob/v1.0.0/shardformer/exact/README.md" in links


def test_release_page_is_the_section_of_the_version():
    command = read_step("Write the release page from the changelog").rpartition("gh release")[0]
    command = command.replace(">notes.md", "")
    environment = {"GITHUB_REF_NAME": f"v{VERSION}", "PATH": "/usr/bin:/bin"}
    notes = subprocess.run(["bash", "-ec", command], cwd=ROOT, env=environment, capture_output=True, text=True).stdout
    section = CHANGELOG.partition(f"\n## {VERSION}")[2].partition("\n## ")[0].partition("\n")[2]
    assert notes.strip() == section.strip() != ""


def read_job(name: str) -> str:
    (found,) = re.findall(rf"^  {name}:\n((?:    .*\n|\n)+)", WORKFLOW, re.MULTILINE)
    return found


def test_one_wheel_is_tested_built_trained_with_and_published():
    build, train, publish = map(read_job, ("build", "train", "publish"))
    assert build.index("run: bash scripts/test.sh\n") < build.index("run: bash scripts/wheel.sh dist\n")
    assert "matrix" not in build
    assert "needs: build\n" in train
    assert 'python: ["3.11", "3.12", "3.13"]' in train
    assert "shardformer train tiny" in read_step("Train with the wheel")
    assert "needs: train\n" in publish
    assert "needs: publish\n" in read_job("page")
    assert WORKFLOW.count("uses: actions/upload-artifact") == 1


def test_workflow_publishes_by_trust():
    publish = read_job("publish")
    assert "id-token: write" in publish
    assert "password" not in publish.replace("in place of a password", "")
