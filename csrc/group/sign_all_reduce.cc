// The sign all-reduce: not c10d's, but an operation of the group like any other.
#include <utility>

#include "absl/strings/str_cat.h"
#include "group/arguments.h"
#include "group/operation.h"
#include "group/process_group.h"

#include <c10/util/Exception.h>

namespace geomesh::group {

c10::intrusive_ptr<WorkGeoMesh> ProcessGroupGeoMesh::SignAllReduce(const Tensors& current,
                                                                   const Tensors& anchor,
                                                                   at::Tensor out,
                                                                   SignArguments arguments) {
  // Keeps what the executor only points to.
  struct Kept {
    exec::SignCall call;
    std::vector<std::string> names;
  };
  // All that ranks may differ in, so that the error in which they are told so shows it.
  int64_t total = 0;
  for (const at::Tensor& tensor : current) total += tensor.defined() ? tensor.numel() : 0;
  Operation op = Begin(
      "sign_all_reduce", "geomesh:sign_all_reduce", c10d::OpType::ALLREDUCE,
      absl::StrCat(current.size(), " tensors of ", total, " elements, ", plan::Name(arguments.form),
                   arguments.rotate ? absl::StrCat(", seed ", absl::Hex(arguments.rotation_seed))
                                    : std::string(", not rotated")));
  const std::string& name = op.work.operation;
  TORCH_CHECK(anchor.empty() || anchor.size() == current.size(), name,
              ": takes an anchor for each tensor or none, got ", anchor.size());
  TORCH_CHECK(arguments.names.empty() || arguments.names.size() == current.size(), name,
              ": takes a name for each tensor or none, got ", arguments.names.size());
  TORCH_CHECK(arguments.row_elements.empty() || arguments.row_elements.size() == current.size(),
              name, ": takes the row length of each tensor or none, got ",
              arguments.row_elements.size());
  auto kept = std::make_shared<Kept>();
  kept->names = std::move(arguments.names);
  int64_t elements = 0;
  for (size_t i = 0; i < current.size(); ++i) {
    codec::Piece piece;
    const std::string label = kept->names.empty() ? absl::StrCat("tensor ", i) : kept->names[i];
    const at::ScalarType type = current[i].scalar_type();
    TORCH_CHECK(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, name, ": ", label,
                " must be float32, bfloat16 or float16, it is ", type);
    at::Tensor memory = op.staging->Source(current[i]);
    piece.current = memory.data_ptr();
    piece.dtype = ToDType(type, name);
    piece.elements = memory.numel();
    if (!anchor.empty()) {
      TORCH_CHECK(anchor[i].is_cpu() && anchor[i].is_contiguous() &&
                      anchor[i].scalar_type() == at::kFloat && anchor[i].numel() == memory.numel(),
                  name, ": the anchor of ", label, " must be contiguous float32 on the CPU with ",
                  memory.numel(), " elements, it is ", Describe(anchor[i]));
      piece.anchor = op.staging->Source(anchor[i]).const_data_ptr<float>();
    }
    if (!arguments.row_elements.empty()) {
      const int64_t row = arguments.row_elements[i];
      TORCH_CHECK(row >= 0 && (row == 0 || memory.numel() % row == 0), name, ": ", label, " has ",
                  memory.numel(), " elements, which are no whole number of rows of ", row);
      piece.row_elements = row;
    }
    if (!kept->names.empty()) piece.name = kept->names[i];
    elements += piece.elements;
    kept->call.pieces.push_back(piece);
    op.fingerprint.Add(piece.elements).Add(piece.row_elements);
  }
  TORCH_CHECK(out.is_cpu() && out.is_contiguous() && out.scalar_type() == at::kFloat &&
                  out.numel() == elements,
              name, ": out must be contiguous float32 on the CPU with ", elements,
              " elements, it is ", Describe(out));
  kept->call.weight = arguments.weight;
  kept->call.rotation_seed = arguments.rotation_seed;
  kept->call.rotate = arguments.rotate;
  if (arguments.residual) {
    at::Tensor& residual = *arguments.residual;
    TORCH_CHECK(residual.is_cpu() && residual.is_contiguous() &&
                    residual.scalar_type() == at::kFloat && residual.numel() == elements,
                name, ": the residual must be contiguous float32 on the CPU with ", elements,
                " elements");
    kept->call.residual = absl::MakeSpan(op.staging->Sink(residual).data_ptr<float>(), elements);
    kept->call.residual_decay = static_cast<float>(arguments.residual_decay);
  }
  op.fingerprint.Add(arguments.rotation_seed)
      .Add(arguments.rotate)
      .Add(static_cast<uint64_t>(arguments.form));
  op.work.inputs = current;
  op.work.outputs = {out};
  op.call.dtype = DType::kF32;
  op.call.input = {{nullptr, elements}};
  op.call.output = {ToBlock(op.staging->Sink(out))};
  op.call.sign = std::shared_ptr<exec::SignCall>(kept, &kept->call);
  op.keep = kept;
  op.shape = {.collective = plan::Collective::kSignAllReduce,
              .bytes = elements * static_cast<int64_t>(sizeof(float)),
              .form = arguments.form};
  return Launch(std::move(op), arguments.timeout);
}

}  // namespace geomesh::group
