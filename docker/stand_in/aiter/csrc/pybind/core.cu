#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "../stand_in_tensor.h"

namespace py = pybind11;
enum class ActivationType { No };
enum class QuantType { No };
enum class MlaVersion { V2 };

PYBIND11_MODULE(module_aiter_core, m) {
    py::enum_<ActivationType>(m, "ActivationType").value("No", ActivationType::No);
    py::enum_<QuantType>(m, "QuantType").value("No", QuantType::No);
    py::enum_<MlaVersion>(m, "MlaVersion").value("V2", MlaVersion::V2);
    // As AITER's is made: address, elements, dimensions, shape, strides, dtype, device.
    py::class_<Tensor>(m, "aiter_tensor_t")
        .def(py::init([](size_t, long numel, int, std::vector<long>, std::vector<long>, int, int) {
            return Tensor{numel};
        }));
}
