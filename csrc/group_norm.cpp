// GroupNorm of images, [samples, channels, *spatial], with a scale and a shift for each channel of
// a sample, and silu behind it: core/group_norm.h. fused_op/_group_norm.py is the other half.
#include "core/group_norm.h"

#include "backend.h"
#include "checks.h"
#include "kernel_arguments.h"
#include "variant.h"

namespace fused_op {
namespace {

constexpr auto kName = "fused_group_norm";

// The tensors and options that both directions have.
struct GroupNormCall {
  const char* op;
  const at::Tensor& input;
  std::int64_t groups;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  const OptionalTensor& scale;
  const OptionalTensor& shift;
  bool silu;

  std::int64_t samples() const { return input.size(0); }
  std::int64_t channels() const { return input.size(1); }
  std::int64_t pixels() const { return c10::multiply_integers(input.sizes().slice(2)); }
  at::ScalarType param_dtype() const {
    return kernel_param_dtype(input.scalar_type(), weight, bias);
  }
  // The dtype in which kernels read scale and shift.
  at::ScalarType entry_dtype() const {
    if (scale && shift) {
      return c10::promoteTypes(scale->scalar_type(), shift->scalar_type());
    }
    return given_dtype(scale, shift, stats_dtype(input.scalar_type()));
  }
};

// Scale or shift, [samples, channels] and then ones.
void check_entry(const GroupNormCall& call, const char* name, const OptionalTensor& entry) {
  if (!entry) {
    return;
  }
  const at::Tensor& input = call.input;
  check_rows(call.op, name, *entry);
  check_device(call.op, name, *entry, input);
  check_precision(call.op, name, *entry, input);
  const bool fits = (entry->dim() == 2 || entry->dim() == input.dim()) &&
                    entry->sizes().slice(0, 2) == input.sizes().slice(0, 2) &&
                    c10::multiply_integers(entry->sizes().slice(2)) == 1;
  TORCH_CHECK(fits, call.op, ": ", name, " must have shape ", input.sizes().slice(0, 2),
              ", the first two dimensions of input, or these and a one for each other, got ",
              entry->sizes());
}

void check_tensors(const GroupNormCall& call) {
  const auto& [op, input, groups, weight, bias, scale, shift, silu] = call;
  check_rows(op, "input", input);
  TORCH_CHECK(input.dim() >= 2, op,
              ": input must have at least two dimensions, [N, C, *spatial], got shape ",
              input.sizes());
  TORCH_CHECK(groups > 0, op, ": Expected num groups to be greater than 0, got ", groups);
  TORCH_CHECK(input.size(1) % groups == 0, op,
              ": Expected number of channels in input to be divisible by num_groups, but got input "
              "of shape ",
              input.sizes(), " and num_groups=", groups);
  const std::array<std::int64_t, 1> channels{input.size(1)};
  check_param_kind(op, "weight", weight, input);
  check_param_kind(op, "bias", bias, input);
  check_param_shape(op, "weight", weight, channels, input);
  check_param_shape(op, "bias", bias, channels, input);
  check_entry(call, "scale", scale);
  check_entry(call, "shift", shift);
}

void check_call_memory(const GroupNormCall& call) {
  check_all_memory(call.op, {{"input", &call.input},
                             {"weight", pointer_to(call.weight)},
                             {"bias", pointer_to(call.bias)},
                             {"scale", pointer_to(call.scale)},
                             {"shift", pointer_to(call.shift)}});
}

// Scale and shift as kernels read them: channels are neighbours, and samples lie at one stride for
// both. Chunks of one projection are read in place.
class Entries {
 public:
  explicit Entries(const GroupNormCall& call)
      : call_(call), scale_(converted(call.scale)), shift_(converted(call.shift)) {
    const bool in_place =
        is_readable(scale_) && is_readable(shift_) &&
        (!scale_.defined() || !shift_.defined() || stride_of(scale_) == stride_of(shift_));
    if (!in_place) {
      scale_ = dense(scale_);
      shift_ = dense(shift_);
    }
  }

  void fill(ChannelArgs& args) const {
    args.entry_dtype = to_dtype(call_.entry_dtype());
    args.scale = const_pointer(scale_);
    args.shift = const_pointer(shift_);
    args.entry_stride = stride_of(scale_.defined() ? scale_ : shift_);
  }

 private:
  at::Tensor converted(const OptionalTensor& given) const {
    return given ? given->to(call_.entry_dtype()) : at::Tensor();
  }
  static at::Tensor dense(const at::Tensor& entry) {
    return entry.defined() ? entry.clone(at::MemoryFormat::Contiguous) : entry;
  }
  std::int64_t stride_of(const at::Tensor& entry) const {
    const bool is_strided = entry.defined() && call_.samples() > 1;
    return is_strided ? entry.stride(0) : call_.channels();
  }
  bool is_readable(const at::Tensor& entry) const {
    if (!entry.defined()) {
      return true;
    }
    const auto address = reinterpret_cast<std::uintptr_t>(entry.const_data_ptr());
    return address % entry.element_size() == 0 && (entry.stride(1) == 1 || call_.channels() == 1);
  }

  const GroupNormCall& call_;
  at::Tensor scale_;
  at::Tensor shift_;
};

// Whether the channels of a pixel are neighbours in memory, those of a plane are not, and pixels
// and samples follow one another.
bool has_channels_innermost(const at::Tensor& image) {
  return image.dim() > 2 && !image.is_contiguous() && image.movedim(1, -1).is_contiguous();
}

// What forward and backward fill in alike.
void fill(GroupNormArgs& args, const GroupNormCall& call, const Parameters& parameters,
          const Entries& entries) {
  args.dtype = to_dtype(call.input.scalar_type());
  args.samples = call.samples();
  args.channels = call.channels();
  args.pixels = call.pixels();
  args.groups = call.groups;
  args.silu = call.silu;
  args.channel.param_dtype = to_dtype(call.param_dtype());
  args.channel.weight = const_pointer(*parameters.weight);
  args.channel.bias = const_pointer(*parameters.bias);
  entries.fill(args.channel);
  args.nhwc = has_channels_innermost(call.input) && backend::reads_nhwc(args, call.input.device());
}

// As kernels read it: planes, or pixels whose channels are neighbours (args.nhwc).
Borrowed readable_image(const at::Tensor& image, bool nhwc) {
  const std::uintptr_t alignment = image.is_cuda() ? kVectorBytes : image.element_size();
  if (!nhwc) {
    return readable_dense(image, alignment);
  }
  return Borrowed::owned(*readable_dense(image.movedim(1, -1), alignment));
}

at::Tensor empty_image(const at::Tensor& like, bool nhwc) {
  if (!nhwc) {
    return backend::empty(like.sizes(), like.scalar_type(), like.device());
  }
  const at::Tensor channels_last = like.movedim(1, -1);
  return backend::empty(channels_last.sizes(), like.scalar_type(), like.device()).movedim(-1, 1);
}

// What a kernel has written, in the layout of `like`.
at::Tensor in_layout_of(const at::Tensor& like, const at::Tensor& image, bool nhwc) {
  if (!image.defined() || nhwc || !has_channels_innermost(like)) {
    return image;
  }
  at::Tensor channels_last = empty_image(like, true);
  channels_last.copy_(image);
  return channels_last;
}

std::tuple<at::Tensor, at::Tensor> group_norm_forward(
    const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& scale, const OptionalTensor& shift, std::int64_t groups, double eps,
    std::optional<std::string_view> activation, bool save_stats) {
  const GroupNormCall call{kName, input, groups, weight,
                           bias,  scale, shift,  parse_silu(activation)};
  check_eps(kName, eps);
  check_tensors(call);
  const at::Tensor stats = backend::empty_if(save_stats, {2, call.samples() * groups},
                                             stats_dtype(input.scalar_type()), input.device());
  if (input.numel() == 0) {
    return {empty_image(input, false), save_stats ? stats.zero_() : nothing_like(input)};
  }
  check_call_memory(call);
  const Parameters parameters(weight, bias, false, call.param_dtype());
  const Entries entries(call);
  GroupNormForwardArgs args;
  fill(args, call, parameters, entries);
  const Borrowed readable = readable_image(input, args.nhwc);
  const at::Tensor output = empty_image(input, args.nhwc);
  args.input = readable->const_data_ptr();
  args.output = pointer(output);
  args.stats = pointer(stats);
  args.eps = eps;
  backend::group_norm_forward(args, input.device());
  return {in_layout_of(input, output, args.nhwc), or_nothing(stats, input)};
}

using GroupNormGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Everything is checked.
std::array<at::Tensor, 5> run_backward(const at::Tensor& grad_output, const GroupNormCall& call,
                                       const at::Tensor& stats, std::array<bool, 5> wanted) {
  const at::Tensor& input = call.input;
  const at::IntArrayRef sizes = input.sizes();
  const at::ScalarType param_dtype = call.param_dtype(), entry_dtype = call.entry_dtype();
  const auto empty = [&](int number, at::IntArrayRef shape, at::ScalarType dtype) {
    return backend::empty_if(wanted[number], shape, dtype, input.device());
  };
  std::array<at::Tensor, 5> grads{at::Tensor(), empty(1, sizes.slice(1, 1), param_dtype),
                                  empty(2, sizes.slice(1, 1), param_dtype),
                                  empty(3, sizes.slice(0, 2), entry_dtype),
                                  empty(4, sizes.slice(0, 2), entry_dtype)};
  if (input.numel() == 0) {
    grads[0] = empty(0, sizes, input.scalar_type());
    for (const at::Tensor& grad : grads) {
      if (grad.defined()) {
        grad.zero_();
      }
    }
    return grads;
  }
  const Borrowed dense_stats = readable_dense(stats, stats.element_size());
  const Parameters parameters(call.weight, call.bias, false, param_dtype);
  const Entries entries(call);
  GroupNormBackwardArgs args;
  fill(args, call, parameters, entries);
  const Borrowed x = readable_image(input, args.nhwc);
  const Borrowed dy = readable_image(grad_output, args.nhwc);
  grads[0] = wanted[0] ? empty_image(input, args.nhwc) : at::Tensor();
  args.input = x->const_data_ptr();
  args.grad_output = dy->const_data_ptr();
  args.stats = dense_stats->const_data_ptr();
  args.grad_input = pointer(grads[0]);
  args.grad_weight = pointer(grads[1]);
  args.grad_bias = pointer(grads[2]);
  args.grad_scale = pointer(grads[3]);
  args.grad_shift = pointer(grads[4]);
  backend::group_norm_backward(args, input.device());
  grads[0] = in_layout_of(input, grads[0], args.nhwc);
  return grads;
}

GroupNormGradients group_norm_backward(const at::Tensor& grad_output, const at::Tensor& input,
                                       const OptionalTensor& weight, const OptionalTensor& bias,
                                       const OptionalTensor& scale, const OptionalTensor& shift,
                                       const at::Tensor& stats, std::int64_t groups,
                                       std::optional<std::string_view> activation,
                                       std::array<bool, 5> wanted) {
  const char* const op = "fused_op::group_norm_backward";
  const GroupNormCall call{op, input, groups, weight, bias, scale, shift, parse_silu(activation)};
  check_tensors(call);
  check_grad(op, "grad_output", grad_output, input);
  check_stats(op, stats, NormKind::kLayerNorm, input, call.samples() * groups);
  if (input.numel() > 0) {
    check_call_memory(call);
    check_memory(op, "grad_output", grad_output);
    check_memory(op, "stats", stats);
  }
  const std::array<at::Tensor, 5> grads = run_backward(grad_output, call, stats, wanted);
  // In the dtype and the shape of what it is the gradient of.
  const auto of = [&](int number, const OptionalTensor& given) {
    const at::Tensor& like = given ? *given : input;
    const at::Tensor& grad = grads[number];
    if (!grad.defined()) {
      return nothing_like(like);
    }
    return given ? grad.to(like.scalar_type()).view(like.sizes()) : grad.to(like.scalar_type());
  };
  return {of(0, {}), of(1, weight), of(2, bias), of(3, scale), of(4, shift)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fused_op, m) {
  register_op(
      m,
      "group_norm_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? "
      "shift, int groups, float eps, str? activation, bool save_stats) -> (Tensor output, "
      "Tensor stats)",
      &group_norm_forward);
  register_op(m,
              "group_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor? bias, "
              "Tensor? scale, Tensor? shift, Tensor stats, int groups, str? activation, bool[5] "
              "wanted) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor "
              "grad_scale, Tensor grad_shift)",
              &group_norm_backward);
}

}  // namespace fused_op
