// Sends and receives: which message a call is, the executor counts (exec/point_to_point.h).
#include "absl/strings/str_cat.h"
#include "group/arguments.h"
#include "group/operation.h"
#include "group/process_group.h"

#include <c10/util/Exception.h>

namespace geomesh::group {

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::PointToPoint(Tensors& tensors, int peer, int tag,
                                                            bool sending) {
  const char* name = sending ? "send" : "recv";
  const bool any = peer == exec::kAnyRank;
  const at::Tensor& tensor = Single(tensors, name);
  Operation op =
      Begin(name, sending ? "geomesh:send" : (any ? "geomesh:recvAnySource" : "geomesh:recv"),
            sending ? c10d::OpType::SEND : (any ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV),
            absl::StrCat(Describe(tensor), sending ? ", to " : ", from ",
                         any ? std::string("any rank") : absl::StrCat("rank ", JobRank(peer)),
                         ", tag ", tag));
  TORCH_CHECK(any || (peer >= 0 && peer < size_), op.work.operation, ": the group has ranks 0 to ",
              size_ - 1);
  TORCH_CHECK_VALUE(peer != rank_, op.work.operation,
                    ": a rank can't exchange messages with itself; copy the tensor instead");
  TORCH_CHECK(!any || size_ > 1, op.work.operation,
              ": the group has one rank, so nothing can come");
  TORCH_CHECK(tag >= 0, op.work.operation, ": a tag is never negative, got ", tag);
  op.work.inputs = op.work.outputs = {tensor};
  if (sending) {
    op.call.input = {ToBytes(op.staging->Source(tensor))};
  } else {
    op.call.output = {ToBytes(op.staging->Sink(tensor))};
  }
  exec::PointToPoint message{peer, static_cast<uint32_t>(tag), sending, nullptr};
  plan::CallShape shape = {.collective = plan::Collective::kSendRecv,
                           .bytes = 0,
                           .root = any ? (rank_ == 0 ? 1 : 0) : peer,
                           .sending = sending};
  op.shape = shape;
  if (any) {
    std::lock_guard<std::mutex> lock(mutex_);
    message.receive_from = [plans = plans_, shape](int rank) mutable {
      shape.root = rank;
      return plans->Get(shape);
    };
  }
  op.call.point_to_point = std::move(message);
  // Sender and receiver call different methods of the same type.
  op.fingerprint = Fingerprint();
  op.fingerprint.Add(static_cast<uint64_t>(tensor.scalar_type()));
  return Launch(std::move(op), c10d::kUnsetTimeout);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::send(Tensors& tensors, int peer, int tag) {
  TORCH_CHECK(peer >= 0, "send: to rank ", peer, ", but the group has ranks 0 to ", size_ - 1);
  return PointToPoint(tensors, peer, tag, /*sending=*/true);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::recv(Tensors& tensors, int peer, int tag) {
  TORCH_CHECK(peer >= 0, "recv: from rank ", peer, ", but the group has ranks 0 to ", size_ - 1);
  return PointToPoint(tensors, peer, tag, /*sending=*/false);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::recvAnysource(Tensors& tensors, int tag) {
  return PointToPoint(tensors, exec::kAnyRank, tag, /*sending=*/false);
}

}  // namespace geomesh::group
