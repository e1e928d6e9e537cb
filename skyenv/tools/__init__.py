"""The tools a software agent works with. A tool's mistakes-by-the-model are answers; only infrastructure raises."""

from __future__ import annotations

from skyenv.tools.bash import ExecuteBash
from skyenv.tools.editor import StrReplaceEditor
from skyenv.tools.finish import Finish
from skyenv.tools.function import FunctionTool, tool
from skyenv.tools.kernel import IPython
from skyenv.tools.presets import ToolChoice, default_tools, make_tools, observation_limit
from skyenv.tools.schema import check_arguments
from skyenv.tools.search import Search
from skyenv.tools.task_tracker import TaskTracker
from skyenv.tools.think import Think

__all__ = [
    "ExecuteBash",
    "Finish",
    "FunctionTool",
    "IPython",
    "Search",
    "StrReplaceEditor",
    "TaskTracker",
    "Think",
    "ToolChoice",
    "check_arguments",
    "default_tools",
    "make_tools",
    "observation_limit",
    "tool",
]
