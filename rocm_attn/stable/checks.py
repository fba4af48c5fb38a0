"""Safeguards, records and checks of a running runtime: stable names, as `ra.checks`."""

# isort: off

# Safeguards, records and checks of a running runtime
from rocm_attn.guards.registry import Guards as Guards
from rocm_attn.guards.registry import guards_from_settings as guards_from_settings
from rocm_attn.selection.arithmetic import arithmetic_id as arithmetic_id
from rocm_attn.machine.watchdog import Watchdog as Watchdog
from rocm_attn.watch.flight_recorder import FlightRecorder as FlightRecorder
from rocm_attn.watch.sampled_check import SampledCheck as SampledCheck
from rocm_attn.watch.shadow_check import shadow_check as shadow_check
