"""Encodings, shared prefixes, and tokens that move elsewhere: stable names, as `ra.pages`."""

# isort: off

# Encodings, shared prefixes, and tokens that move to another pool or to host memory
from rocm_attn.kernels.cache.page_format import Encoding as Encoding
from rocm_attn.paging.state_slots import require_state_slots as require_state_slots
from rocm_attn.batch.prefixes import PrefixGroup as PrefixGroup
from rocm_attn.batch.prefixes import SharedPrefixes as SharedPrefixes
from rocm_attn.integrations.kv_passport import KVExtent as KVExtent
from rocm_attn.integrations.kv_passport import KVPassport as KVPassport
from rocm_attn.integrations.kv_transfer import KVExporter as KVExporter
from rocm_attn.integrations.kv_transfer import KVImporter as KVImporter
from rocm_attn.integrations.host_pages import HostPages as HostPages
from rocm_attn.paging.host_memory import HostMemory as HostMemory
