// torch_geomesh._C: nothing but conversions between Python and the storeys below.
//
// Exceptions begin here: a status becomes ValueError (InvalidArgument) or RuntimeError. Calls that
// may block let go of Python's lock.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/version.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/options.h"
#include "codec/sign.h"
#include "group/process_group.h"
#include "group/work.h"
#include "plan/program.h"
#include "train/outer_step.h"
#include "transport/wire/device.h"

#if defined(GEOMESH_CUDA)
#include "cuda/sign_cuda.h"
#endif

namespace py = pybind11;

namespace geomesh {
namespace {

using group::ProcessGroupGeoMesh;
using group::WorkGeoMesh;

void ThrowIfError(const absl::Status& status) {
  if (status.ok()) return;
  if (absl::IsInvalidArgument(status)) throw py::value_error(std::string(status.message()));
  throw std::runtime_error(std::string(status.message()));
}

// Ends a blocking wait of the main thread when a signal's Python handler raises.
void CheckSignals() {
  if (!Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

template <typename T>
using Holder = c10::intrusive_ptr<T>;

py::list OptionDicts() {
  py::list rows;
  for (const OptionInfo& info : OptionTable()) {
    py::dict row;
    row["name"] = std::string(info.name);
    row["variable"] = std::string(info.variable);
    row["type"] = std::string(info.type);
    row["default"] = std::string(info.default_value);
    row["meaning"] = std::string(info.meaning);
    rows.append(row);
  }
  return rows;
}

py::dict StatsDict(const transport::PeerStats& stats) {
  py::dict row;
  row["peer"] = stats.description;
  row["lanes"] = stats.lanes;
  py::list lanes;
  for (const transport::LaneStats& lane : stats.lane_stats) {
    py::dict one;
    one["name"] = lane.name;
    one["bytes_sent"] = lane.bytes_sent;
    one["segments_sent"] = lane.segments_sent;
    one["in_flight_bytes"] = lane.in_flight_bytes;
    one["window_bytes"] = lane.window_bytes;
    one["delivery_bytes_per_s"] = lane.delivery_bytes_per_s;
    one["rtt_s"] = absl::ToDoubleSeconds(lane.rtt);
    one["min_rtt_s"] = absl::ToDoubleSeconds(lane.min_rtt);
    lanes.append(one);
  }
  row["lane_stats"] = lanes;
  row["lanes_lost"] = stats.lanes_lost;
  row["queue_wait_s"] = absl::ToDoubleSeconds(stats.queue_wait);
  row["bytes_sent"] = stats.bytes_sent;
  row["bytes_received"] = stats.bytes_received;
  row["segments_sent"] = stats.segments_sent;
  row["segments_received"] = stats.segments_received;
  row["unexpected_bytes"] = stats.unexpected_bytes;
  row["delivery_bytes_per_s"] = stats.delivery_bytes_per_s;
  row["rtt_s"] = absl::ToDoubleSeconds(stats.rtt);
  row["silent_s"] = absl::ToDoubleSeconds(stats.silent);
  return row;
}

plan::SignForm ToForm(const std::string& text) {
  for (const auto form :
       {plan::SignForm::kChosen, plan::SignForm::kExchange, plan::SignForm::kReduceAndRecode}) {
    if (text == plan::Name(form)) return form;
  }
  throw py::value_error("form takes 'auto', 'exchange' or 'recode', got '" + text + "'");
}

DType FloatType(const at::Tensor& tensor, const char* what) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::kF32;
    case at::kBFloat16:
      return DType::kBF16;
    case at::kHalf:
      return DType::kF16;
    default:
      throw py::value_error(std::string(what) + " must be float32, bfloat16 or float16");
  }
}

void CheckFlat(const at::Tensor& tensor, int64_t elements, const char* what) {
  if (!tensor.is_cpu() || !tensor.is_contiguous() || tensor.scalar_type() != at::kFloat ||
      tensor.numel() != elements) {
    throw py::value_error(std::string(what) + " must be contiguous float32 on the CPU with " +
                          std::to_string(elements) + " elements");
  }
}

// ---- the codec alone, for tests and tools ----

std::vector<codec::Piece> ToPieces(const std::vector<at::Tensor>& current,
                                   const std::vector<int64_t>& row_elements) {
  if (!row_elements.empty() && row_elements.size() != current.size()) {
    throw py::value_error("row_elements takes one number a tensor or none");
  }
  std::vector<codec::Piece> pieces;
  for (size_t i = 0; i < current.size(); ++i) {
    if (!current[i].is_cpu() || !current[i].is_contiguous())
      throw py::value_error("tensors must be contiguous on the CPU");
    codec::Piece piece;
    piece.current = current[i].data_ptr();
    piece.dtype = FloatType(current[i], "tensors");
    piece.elements = current[i].numel();
    piece.row_elements = row_elements.empty() ? 0 : row_elements[i];
    pieces.push_back(piece);
  }
  return pieces;
}

codec::Range WholeRange(const std::vector<codec::Piece>& pieces) {
  codec::Range range;
  for (const codec::Piece& piece : pieces) range.elements += piece.elements;
  return range;
}

py::bytes SignEncode(const std::vector<at::Tensor>& tensors, uint64_t rotation_seed,
                     uint64_t dither_seed, uint64_t weight,
                     const std::vector<int64_t>& row_elements, bool rotate) {
  const std::vector<codec::Piece> pieces = ToPieces(tensors, row_elements);
  const codec::Range range = WholeRange(pieces);
  std::vector<std::byte> code(codec::MaxEncodedBytes(pieces, range));
  codec::EncodeOptions options;
  options.weight = weight;
  absl::StatusOr<size_t> bytes = codec::Encode(
      pieces, range, {.rotate = rotate, .rotation_seed = rotation_seed, .dither_seed = dither_seed},
      options, absl::MakeSpan(code));
  ThrowIfError(bytes.status());
  return py::bytes(reinterpret_cast<const char*>(code.data()), *bytes);
}

at::Tensor SignDecodeMean(const std::vector<std::string>& codes,
                          const std::vector<at::Tensor>& like, uint64_t rotation_seed,
                          const std::vector<int64_t>& row_elements, bool rotate) {
  const std::vector<codec::Piece> pieces = ToPieces(like, row_elements);
  const codec::Range range = WholeRange(pieces);
  std::vector<float> sum(codec::SignAccumulator::SumElements(range));
  codec::SignAccumulator accumulator(
      pieces, range, {.rotate = rotate, .rotation_seed = rotation_seed}, absl::MakeSpan(sum));
  for (const std::string& code : codes) {
    ThrowIfError(accumulator.Add(
        absl::MakeConstSpan(reinterpret_cast<const std::byte*>(code.data()), code.size())));
  }
  at::Tensor mean = at::empty({range.elements}, at::kFloat);
  accumulator.Finish(absl::MakeSpan(mean.data_ptr<float>(), range.elements));
  return mean;
}

// ---- train ----

void OuterStep(const std::vector<at::Tensor>& anchor, const std::vector<at::Tensor>& current,
               const at::Tensor& momentum, const at::Tensor& mean, double lr, double mu,
               bool nesterov) {
  if (anchor.size() != current.size())
    throw py::value_error("takes an anchor for each current tensor");
  std::vector<train::OuterPiece> pieces;
  std::vector<std::pair<at::Tensor, at::Tensor>>
      copies;  // current tensors that are not contiguous CPU memory
  int64_t elements = 0;
  for (size_t i = 0; i < anchor.size(); ++i) {
    CheckFlat(anchor[i], current[i].numel(), "each anchor");
    at::Tensor memory = current[i];
    if (!memory.is_cpu() || !memory.is_contiguous()) {
      memory = at::empty(current[i].sizes(), current[i].options().device(at::kCPU).memory_format(
                                                 at::MemoryFormat::Contiguous));
      copies.emplace_back(current[i], memory);
    }
    pieces.push_back({.anchor = anchor[i].data_ptr<float>(),
                      .current = memory.data_ptr(),
                      .dtype = FloatType(memory, "each current tensor"),
                      .elements = memory.numel()});
    elements += memory.numel();
  }
  CheckFlat(momentum, elements, "momentum");
  CheckFlat(mean, elements, "mean");
  {
    py::gil_scoped_release release;
    train::OuterStep(
        pieces, absl::MakeSpan(momentum.data_ptr<float>(), elements),
        absl::MakeConstSpan(mean.data_ptr<float>(), elements),
        {.lr = static_cast<float>(lr), .momentum = static_cast<float>(mu), .nesterov = nesterov});
  }
  c10::NoGradGuard no_grad;
  for (auto& [tensor, memory] : copies) tensor.copy_(memory);
}

// The parts that a build may be without, each with "ready" or why it can't work on this machine.
py::dict Features() {
  py::dict features;
#if defined(GEOMESH_CUDA)
  const absl::Status status = cuda::Available();
  features["cuda"] = status.ok() ? "ready" : std::string(status.message());
#endif
  return features;
}

// The device that the engine would take; `single_host`: whether all ranks share this host.
py::dict ChooseDevice(const std::optional<std::string>& interface, const std::string& master,
                      std::optional<bool> single_host) {
  transport::DeviceOptions options;
  options.interface = interface;
  options.master = master;
  if (single_host.has_value()) {
    options.scope =
        *single_host ? transport::HostScope::kSingleHost : transport::HostScope::kSeveralHosts;
  }
  absl::StatusOr<transport::Device> device;
  {
    py::gil_scoped_release release;  // may look a name up
    device = transport::ChooseDevice(options);
  }
  ThrowIfError(device.status());
  py::dict chosen;
  chosen["interface"] = device->interface;
  chosen["address"] = device->address.AddressString();
  chosen["loopback"] = device->address.is_loopback();
  chosen["public"] = device->address.is_public();
  return chosen;
}

std::shared_ptr<void> ReleaseLock() {
  if (!Py_IsInitialized() || !PyGILState_Check()) return nullptr;
  return std::make_shared<py::gil_scoped_release>();
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() =
      "The engine of torch_geomesh. Use the Python package's names; this module's may change.";
  group::SetInterruptCheck(&CheckSignals);
  group::SetUnlock(&ReleaseLock);
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    const py::gil_scoped_release unlocked;
    group::EndPython();
  }));

  m.def("option_table", &OptionDicts, "The table of options as a list of dicts.");
  m.def(
      "unknown_variables",
      [](const std::vector<std::string>& names) { return UnknownVariables(names); },
      py::arg("names"), "A sentence for each GEOMESH_ variable that nothing reads.");

  py::class_<group::TopologySpec>(m, "TopologySpec")
      .def(py::init([](std::string name, std::vector<std::string> regions,
                       std::vector<double> bytes_per_s, std::vector<double> delay_s) {
             const size_t links = regions.size() * regions.size();
             if (bytes_per_s.size() != links || delay_s.size() != links) {
               throw py::value_error("bytes_per_s and delay_s take regions x regions numbers");
             }
             return group::TopologySpec{std::move(name), std::move(regions), std::move(bytes_per_s),
                                        std::move(delay_s)};
           }),
           py::arg("name"), py::arg("regions"), py::arg("bytes_per_s"), py::arg("delay_s"));

  py::class_<ProcessGroupGeoMesh::Options, c10d::Backend::Options,
             Holder<ProcessGroupGeoMesh::Options>>(m, "Options")
      .def(py::init([](py::kwargs values) {
             absl::StatusOr<Options> engine = Options::FromEnvironment();
             ThrowIfError(engine.status());
             auto options = c10::make_intrusive<ProcessGroupGeoMesh::Options>();
             for (auto [key, value] : values) {
               const std::string name = py::str(key).cast<std::string>();
               ThrowIfError(engine->Set(name, py::str(value).cast<std::string>()));
               options->given.push_back(name);
             }
             options->engine = *std::move(engine);
             return options;
           }),
           "The environment's options, changed by the named ones, whose values are texts as in the "
           "GEOMESH_ variables.")
      .def_property_readonly(
          "topology_name", [](const ProcessGroupGeoMesh::Options& o) { return o.engine.topology; })
      .def_property_readonly("region",
                             [](const ProcessGroupGeoMesh::Options& o) { return o.engine.region; })
      .def_readwrite("topology", &ProcessGroupGeoMesh::Options::topology)
      .def(
          "set_meeting",
          [](ProcessGroupGeoMesh::Options& o, std::vector<int> members, std::string job,
             std::string name) {
            o.meeting = {std::move(members), std::move(job), std::move(name)};
          },
          py::arg("members"), py::arg("job"), py::arg("name"))
      .def("set_timeout", [](ProcessGroupGeoMesh::Options& o, double seconds) {
        o.timeout = std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
      });

  py::class_<WorkGeoMesh, c10d::Work, Holder<WorkGeoMesh>>(m, "Work")
      .def_property_readonly("total_weight",
                             [](const WorkGeoMesh& w) { return w.outcome().total_weight; })
      .def_property_readonly("bytes_sent",
                             [](const WorkGeoMesh& w) { return w.outcome().bytes_sent; })
      .def_property_readonly("bytes_received",
                             [](const WorkGeoMesh& w) { return w.outcome().bytes_received; });

  py::class_<ProcessGroupGeoMesh, c10d::Backend, Holder<ProcessGroupGeoMesh>>(m,
                                                                              "ProcessGroupGeoMesh")
      .def(py::init([](const Holder<c10d::Store>& store, int rank, int size,
                       Holder<ProcessGroupGeoMesh::Options> options) {
             return c10::make_intrusive<ProcessGroupGeoMesh>(store, rank, size, std::move(options));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"),
           py::call_guard<py::gil_scoped_release>())
      .def(
          "sign_all_reduce",
          [](const Holder<ProcessGroupGeoMesh>& self, const std::vector<at::Tensor>& current,
             std::optional<std::vector<at::Tensor>> anchor, at::Tensor out, uint64_t weight,
             uint64_t rotation_seed, std::vector<std::string> names,
             std::vector<int64_t> row_elements, bool rotate, std::optional<at::Tensor> residual,
             double residual_decay, const std::string& form,
             std::optional<std::chrono::milliseconds> timeout) {
            group::SignArguments arguments;
            arguments.weight = weight;
            arguments.rotation_seed = rotation_seed;
            arguments.names = std::move(names);
            arguments.row_elements = std::move(row_elements);
            arguments.rotate = rotate;
            arguments.residual = std::move(residual);
            arguments.residual_decay = residual_decay;
            arguments.form = ToForm(form);
            if (timeout) arguments.timeout = *timeout;
            py::gil_scoped_release release;
            return self->SignAllReduce(current, anchor.value_or(std::vector<at::Tensor>{}),
                                       std::move(out), std::move(arguments));
          },
          py::arg("current"), py::arg("anchor"), py::arg("out"), py::kw_only(), py::arg("weight"),
          py::arg("rotation_seed"), py::arg("names") = std::vector<std::string>{},
          py::arg("row_elements") = std::vector<int64_t>{}, py::arg("rotate") = true,
          py::arg("residual") = py::none(), py::arg("residual_decay") = 1.0,
          py::arg("form") = "auto", py::arg("timeout") = py::none())
      // c10d's new_group calls it on ranks that the new group leaves out, where the job's group is
      // bound to a device. Splitting takes nothing from them here.
      .def(
          "perform_nocolor_split", [](ProcessGroupGeoMesh&, const at::Device&) {},
          py::arg("device"))
      .def_property_readonly("regions", &ProcessGroupGeoMesh::regions)
      .def_property_readonly("channel", &ProcessGroupGeoMesh::channel,
                             "A number that all ranks of this group have, and no other group.")
      .def("stats", [](const Holder<ProcessGroupGeoMesh>& self) {
        std::vector<transport::PeerStats> stats;
        {
          py::gil_scoped_release release;
          stats = self->Stats();
        }
        py::list rows;
        for (const transport::PeerStats& peer : stats) rows.append(StatsDict(peer));
        return rows;
      });

  m.def(
      "built_for_torch", [] { return TORCH_VERSION; },
      "The PyTorch that this module was compiled against.");
  m.def("choose_device", &ChooseDevice, py::arg("interface") = py::none(), py::arg("master") = "",
        py::arg("single_host") = py::none(),
        "The interface and address that the engine would take; None for single_host: not known.");
  m.def("features", &Features,
        "The parts that a build may be without (\"cuda\"): \"ready\", or why not on this machine.");
  m.def("sign_encode", &SignEncode, py::arg("tensors"), py::arg("rotation_seed"),
        py::arg("dither_seed"), py::arg("weight") = 1,
        py::arg("row_elements") = std::vector<int64_t>{}, py::arg("rotate") = true,
        "The code of the concatenated tensors (docs/wire-format.md).");
  m.def("sign_decode_mean", &SignDecodeMean, py::arg("codes"), py::arg("like"),
        py::arg("rotation_seed"), py::arg("row_elements") = std::vector<int64_t>{},
        py::arg("rotate") = true, "The weighted mean of codes, flat float32.");
  m.def(
      "outer_step_", &OuterStep, py::arg("anchor"), py::arg("current"), py::arg("momentum"),
      py::arg("mean"), py::arg("lr"), py::arg("mu"), py::arg("nesterov") = true,
      "momentum = mu * momentum + mean; anchor -= lr * (mean + mu * momentum); current = anchor.");
}

}  // namespace geomesh
