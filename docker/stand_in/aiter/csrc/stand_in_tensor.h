// The type that one module defines and the others take: pybind11 shares it where all were built with one release of it.
#pragma once
struct Tensor {
    long numel;
};
// What says in a module which GPUs it holds code for.
__attribute__((used)) static const char offload_entry[] = "hipv4-amdgcn-amd-amdhsa--gfx942";
