"""mini-swe-agent with its own configuration `mini`."""

import os

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_path
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from task import MODEL, QUESTION, reward

config = yaml.safe_load(get_config_path("mini").read_text())["agent"]
known = ("system_template", "instance_template")
model = LitellmModel(
    model_name=f"openai/{MODEL}",
    model_kwargs={"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]},
    cost_tracking="ignore_errors",
)
agent = DefaultAgent(model, LocalEnvironment(), **{key: config[key] for key in known}, step_limit=5)
end = agent.run(QUESTION)
assert end["exit_status"] == "Submitted", end
assert "42" in end["submission"], end
reward()
