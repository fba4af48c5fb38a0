# The stable names of the serving engine, each once, in the groups of docs/names.md.
# isort: off

__version__: str

# rocm_serve: sampling
from rocm_serve.sampling.sampling import Sampler as Sampler
from rocm_serve.sampling.sampling_options import Sampling as Sampling
from rocm_serve.text.constraint import Constraint as Constraint
from rocm_serve.sampling.logprobs import NO_LOGPROBS as NO_LOGPROBS
from rocm_serve.sampling.logprobs import TokenLogprobs as TokenLogprobs
from rocm_serve.sampling.sampling import pick_tokens as pick_tokens

# rocm_serve: the engine
from rocm_serve.engine import Engine as Engine
from rocm_serve.async_engine import AsyncEngine as AsyncEngine
from rocm_serve.async_engine import EngineClient as EngineClient
from rocm_serve.async_engine import EngineEnded as EngineEnded
from rocm_serve.async_engine import TooManyRequests as TooManyRequests
from rocm_serve.engine_process import EngineDied as EngineDied
from rocm_serve.engine_process import EngineProcess as EngineProcess
from rocm_serve.models.loading import load_model as load_model
from rocm_serve.parallel.messages import RankError as RankError
from rocm_serve.parallel.processes import RankFailed as RankFailed
from rocm_serve.parallel.ranked_engine import RankedEngine as RankedEngine
from rocm_serve.ranks import RanksOfGroup as RanksOfGroup
from rocm_serve.options import EngineOptions as EngineOptions
from rocm_serve.report import Report as Report
from rocm_serve.request import AbortEvent as AbortEvent
from rocm_serve.request import Completion as Completion
from rocm_serve.request import FailureEvent as FailureEvent
from rocm_serve.request import Request as Request
from rocm_serve.request import RequestsFailed as RequestsFailed
from rocm_serve.request import RequestsFaulted as RequestsFaulted
from rocm_serve.request import TokenEvent as TokenEvent
from rocm_serve.engine_thread import ServingEngine as ServingEngine
from rocm_serve.request_stream import OutputChunk as OutputChunk
from rocm_serve.request_stream import RequestFailed as RequestFailed
from rocm_serve.request_stream import RequestStream as RequestStream
