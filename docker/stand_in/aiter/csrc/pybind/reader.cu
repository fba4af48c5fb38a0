#include <pybind11/pybind11.h>

#include "../stand_in_tensor.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("same", [](int number) { return number; }, py::arg("number"));
    m.def("numel", [](const Tensor& tensor) { return tensor.numel; }, py::arg("tensor"));
}
