"""What a plan looks like to people (text) and to programs (JSON)."""

from __future__ import annotations

from hetspmd.report.candidates import candidates_text
from hetspmd.report.document import plan_json
from hetspmd.report.notation import program_text, step_text
from hetspmd.report.schedule_text import schedule_text
from hetspmd.report.summary import plan_text

__all__ = ["candidates_text", "plan_json", "plan_text", "program_text", "schedule_text", "step_text"]
